"""What a cache holds, to compare bit by bit."""

import torch

ASKED = ("error", "longest_query", "recall", ".reads")  # of the queries that came, not of what is held


def state_of(cache, *, asked=True):
    """All that all layers hold, by name; without `asked` what was noted about queries is left out."""
    found = {}
    for index, layer in enumerate(cache.layers):
        if hasattr(layer, "held"):
            tensors, numbers = layer.state()
            if not asked:
                tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(ASKED)}
                numbers = {name: value for name, value in numbers.items() if name != "measured_at"}
            found |= {f"{index}.{name}": tensor.clone() for name, tensor in tensors.items()}
            found[f"{index}"] = repr(numbers)
            continue
        for name, value in vars(layer).items():
            for number, tensor in value.items() if isinstance(value, dict) else [(0, value)]:
                if isinstance(tensor, torch.Tensor):
                    found[f"{index}.{name}.{number}"] = tensor.clone()
    return found


def difference(left, right):
    """The first part in which two states differ; None if they are the same."""
    for name in left.keys() | right.keys():
        one, other = left.get(name), right.get(name)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            if one.shape != other.shape or not torch.equal(one, other):
                return name
        elif type(one) is not type(other) or one != other:
            return name
    return None
