"""One layer of the cache, as transformers sees it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from kvsketch.attention import Partial
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.query import Query
from kvsketch.caches.core.tokens import NewTokens, Unrotated
from kvsketch.huggingface import stock
from kvsketch.huggingface.attention import link
from kvsketch.huggingface.autocast import dtype_of, without_autocast
from kvsketch.huggingface.model import ModelLink
from kvsketch.huggingface.positions import Positions
from kvsketch.huggingface.rotation import WATCH, BeforeRotation


class SketchLayer(CacheLayerMixin):
    """One full-attention layer: takes new tokens in `update`, holds them once the attention function has read them."""

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, held: LayerCache, model: ModelLink) -> None:
        super().__init__()
        self.held, self.model = held, model
        self.is_first = False  # of the cache's sketch layers: it keeps padding and positions, which are the same in all
        self.positions = Positions()
        self.watcher: Callable[[Query, Partial], None] | None = None  # is told of queries and their answers
        self.pending = 0  # new tokens that were taken and that attention has not asked for yet
        self.refuse: Callable[[], None] | None = None  # refuses those tokens, if they are NaN or infinite
        self.broken = False  # a read failed half-way
        self.cropped = True  # `crop` was called since the last read

    @property
    def is_croppable(self) -> bool:
        """Whether all that comes can be taken back: yes while compression is held back, as assisted decoding asks."""
        return self.held.recording

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Buffers are made when tokens come."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new tokens; the attention function finds this layer through the keys returned."""
        self.check_keys(key_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.pending = key_states.shape[2]
        return link(key_states, self), value_states

    def read(
        self,
        query: Tensor,
        new: NewTokens,
        scale: float,
        softcap: float | None,
        *,
        lse: bool,
        sinks: Tensor | None = None,
    ) -> Partial:
        """Attention over all that is held and the new tokens, which are held from now on."""
        self.broken = True  # until the read is through
        part = self.held.read(query, new, scale, softcap, lse=lse, sinks=sinks, begin=self._begin)
        if self.is_first and self.held.next_rank is None:
            self.positions.remember(new, self.held.seen)
            self.positions.checked = False
        self.broken = self.cropped = False
        return part

    def _begin(self) -> None:
        """Called before a read changes anything: refuse tokens that are NaN or infinite."""
        refuse, self.refuse = self.refuse, None
        if refuse is not None:
            try:
                refuse()
            except ValueError:
                self.held.forget_start()
                self.broken = False
                raise

    def came_one(self) -> None:
        """Count a token of every row that only the device has counted so far."""
        self.held.came_one()
        if self.is_first:
            self.positions.remember_one()

    def read_again(self, exact: "SketchLayer") -> None:
        """Hold, in this method's way, the text that an exact layer holds."""
        if not exact.held.started:
            return
        columns = exact.held.window.columns
        valid = columns.ranks >= 0 if exact.held.ragged else None
        with without_autocast(columns.keys):
            there, own = exact.held.config.askings, self.held.config.askings
            notes = None if columns.notes is None else there.of(columns.notes, own)
            self.held.hold(NewTokens(columns.keys, columns.values, valid), notes=notes)
        self.held.seen = exact.held.seen  # places where all rows are padded are counted, but not held
        self.positions.copy_from(exact.positions)
        self.lazy_initialization(columns.keys, columns.values)
        self.cropped = exact.cropped

    def check_positions_once(self, positions: Tensor | None, new: NewTokens) -> None:
        """In the first layer: refuse wrong positions that the model has made since the call came without any."""
        looked_at = self.positions.checked or self.held.next_rank is not None
        if not looked_at and positions is not None:
            self.check_positions(positions, new.valid, new.keys.shape[0])

    def check_positions(self, positions: Tensor, valid: Tensor | None, rows: int) -> None:
        """Refuse new tokens that do not continue those held."""
        self.positions.check(positions, valid, self.held.lengths or [0] * rows)

    def check_asked_by(self, module: nn.Module) -> None:
        """Called when the attention function has found this layer: refuse a second look, and another model's module."""
        if not self.pending:
            raise ValueError(
                f"{type(module).__name__} reads the tokens of layer {self.held.layer} twice: kvsketch does not "
                "serve such a model, use transformers' own cache"
            )
        self.pending = 0
        if id(module) not in self.model.modules:
            self.model.check_module(module)

    def check_watched(self, module: nn.Module) -> None:
        """Refuse an attention module whose rotation is not watched, if the method needs that."""
        if self.held.config.before_rotation and getattr(module, WATCH, None) is None:
            raise ValueError(
                f"{self.held.config.name} needs queries and keys as they are before rotation, and the model was "
                "attached without that: kvsketch.attach(model, before_rotation=True)"
            )

    def before_rotation(self, module: nn.Module, queries: Tensor, keys: Tensor) -> Unrotated | None:
        """Queries and keys of the call as they were before rotation, if the method asks for them."""
        if not self.held.config.before_rotation:
            return None
        self.check_watched(module)
        watch: BeforeRotation = getattr(module, WATCH)
        ahead = watch.ahead(self.held.layer, len(queries)) if self.held.config.looks_ahead else None
        return Unrotated(*watch.take(self.held.layer, queries, keys, check=queries.shape[2] > 1), ahead)

    def check_keys(self, keys: Tensor) -> None:
        """Refuse keys that cannot be this layer's."""
        kind = self.held.kind
        if kind is None:
            return
        _, here, _, wide = keys.shape
        if kind != (here, wide, dtype_of(keys)):
            heads, width, dtype = kind
            raise ValueError(
                f"layer {self.held.layer} holds {heads} KV heads of width {width} in {dtype}, "
                f"but {here} of width {wide} in {dtype_of(keys)} came: the cache is another model's, or "
                "was filled under another torch.autocast"
            )

    def get_seq_length(self) -> int:
        """Tokens seen, not tokens held: positions follow from it."""
        return self.held.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The logical size of the mask; the attention function makes its own."""
        return self.held.seen + query_length, 0

    def get_max_length(self) -> int:
        """There is no maximum."""
        return -1

    def activate_past_recording(self) -> None:
        """Hold back compression until `crop` says how many of the latest tokens stay."""
        self.held.recording = True

    def take_back(self, count: int, dropped: list[int]) -> None:
        """Take back `count` places, of which `dropped` are tokens of each row; then compress what was held back."""
        if not self.held.started:
            return
        self.held.crop(count, dropped)
        self.positions.take_back(count)
        self.cropped = True
        if self.held.recording:
            self.settle(recording=True)

    def settle(self, *, recording: bool) -> None:
        """Compress what was held back; `recording`: whether to hold back what comes next."""
        self.held.recording = False
        if self.held.started:
            with without_autocast(self.held.window.keys.view):
                self.held.settle()
        self.held.recording = recording

    def reset(self) -> None:
        """Forget everything, a call that failed half-way included."""
        self.held.reset()
        self.held.recording = False
        self.positions = Positions()
        self.pending, self.refuse, self.cropped = 0, None, True
        self.broken = self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        self._map_rows(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._map_rows([row for row in range(len(self.held.lengths)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows."""
        index = torch.as_tensor(indices, device="cpu")
        self._map_rows((index.nonzero()[:, 0] if index.dtype == torch.bool else index).tolist())

    def _map_rows(self, rows: list[int]) -> None:
        self.held.map_rows(rows)
        self.positions.map_rows(rows)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""
        return self.held.nbytes

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that `restore` needs, as tensors and as JSON."""
        tensors, numbers = self.held.state()
        padding, offsets = self.positions.state()
        return tensors | padding, numbers | offsets

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        self.reset()
        self.held.restore(tensors, numbers)
        self.positions.restore(tensors, numbers, self.held.lengths, self.held.seen, known=self.is_first)
        self.lazy_initialization(self.held.window.keys.view, self.held.window.values.view)

    def offload(self) -> None:
        """Not supported; `make_cache` never asks for it."""
        raise ValueError("kvsketch caches are not offloaded: a smaller keep= holds less")


class HybridSketchLayer(SketchLayer, LinearAttentionAndFullAttentionLayer):
    """A layer with attention, held as in `SketchLayer`, and linear attention beside it, held as in transformers."""

    def __init__(self, held: LayerCache, model: ModelLink, number_of_states: int = 1) -> None:
        SketchLayer.__init__(self, held, model)
        LinearAttentionAndFullAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:
        """Make buffers for attention, given keys and values; or for linear attention, given its states by name."""
        if keys_and_values:
            SketchLayer.lazy_initialization(self, *keys_and_values)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)

    def reset(self) -> None:
        """Forget everything."""
        SketchLayer.reset(self)
        LinearAttentionLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        SketchLayer.reorder_cache(self, beam_idx)
        LinearAttentionLayer.reorder_cache(self, beam_idx)

    def read_again(self, exact: SketchLayer) -> None:
        SketchLayer.read_again(self, exact)
        stock.restore_linear(self, *stock.linear_state(exact), len(self.held.lengths))

    @property
    def nbytes(self) -> int:
        return self.held.nbytes + stock.bytes_held(self)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, numbers = SketchLayer.state(self)
        states, beside = stock.linear_state(self)
        return tensors | states, numbers | beside

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        SketchLayer.restore(self, tensors, numbers)
        stock.restore_linear(self, tensors, numbers, len(self.held.lengths))
