"""The tables of docs/results.md from the rows in docs/results: `python benchmarks/tables.py`."""

from figures import rows

MIB = 2**20


def memory() -> None:
    print("| way | peak above start | cache afterwards | of full | prefill |\n|---|---|---|---|---|")
    for row in sorted(rows("memory"), key=lambda row: row["peak_growth_bytes"]):
        peak, cache_size = row["peak_growth_bytes"] / MIB, row["cache_bytes"] / MIB
        taken = row["prefill_seconds"]
        print(f"| {row['way']} | {peak:,.0f} MiB | {cache_size:,.0f} MiB | {row['of_full']:.4f} | {taken:.0f} s |")


def decode() -> None:
    print(
        "| n | KV heads | method | ms/token, median [quartiles] | × stock | cache, of full |\n|---|---|---|---|---|---|"
    )
    for row in sorted(rows("decode"), key=lambda row: (row["kv_heads"], row["n"])):
        low, _, high = row["ms_quartiles"]
        print(
            f"| {row['n']:,} | {row['kv_heads']} of {row['heads']} | `{row['method']}` | {row['ms_per_token']:.1f} "
            f"[{low:.1f}, {high:.1f}] | {row['times_stock']:.2f} | {row['of_full']:.3f} |"
        )


def long_prompt() -> None:
    print(
        "| way | tokens | memory above start at ¼, ½, ¾, end | cache | of full | tokens/s |\n|---|---|---|---|---|---|"
    )
    for row in rows("long_prompt"):
        curve = [growth / MIB for _, growth in row["resident_growth"]]
        quarters = ", ".join(f"{curve[len(curve) * i // 4 - 1]:,.0f}" for i in (1, 2, 3, 4))
        share = row["cache_bytes"] / row["full_bytes"]
        print(
            f"| `{row['way']}` | {row['n']:,} | {quarters} MiB | {row['cache_bytes'] / MIB:,.0f} MiB "
            f"| {share:.3f} | {row['tokens_per_second']:,.0f} |"
        )


if __name__ == "__main__":
    for table in (memory, decode, long_prompt):
        table()
        print()
