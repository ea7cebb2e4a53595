"""Floors: the least bytes and operations of each operation, and the seconds they take on a device.

Bytes are those that must cross the device memory's bus: every weight and cache row once, and activations where they are
as large as a weight tile's. What the neighbours in a layer have just written or read next, and the L2 holds (the
residual; the queries and results of attention), is not counted. bf16 throughout.
"""

from dataclasses import dataclass

BYTES = 2  # of an element


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Ceilings measured on a device: bytes per second of its memory, bf16 operations per second."""

    name: str
    bytes_per_second: float
    flops: float


H200 = Device(name="NVIDIA H200", bytes_per_second=4.3e12, flops=790e12)
DEVICES = {device.name: device for device in (H200,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model that decide its floors; as many KV heads as heads."""

    d_model: int
    heads: int
    head_dim: int
    mlp: int
    vocab: int
    layers: int

    @property
    def layer_weights(self) -> int:
        """Elements of a layer's matrices."""
        return self.d_model * (4 * self.heads * self.head_dim + 3 * self.mlp)

    @property
    def cache_bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return self.layers * 2 * self.heads * self.head_dim * BYTES


LLADA_8B = Shape(d_model=4096, heads=32, head_dim=128, mlp=12288, vocab=126464, layers=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an operation cannot do without."""

    bytes: float
    flops: float

    def floor(self, device: Device) -> float:
        """Seconds: those of the bytes or those of the operations, whichever take longer."""
        return max(self.bytes / device.bytes_per_second, self.flops / device.flops)


def product(*, rows: int, k: int, n: int) -> Work:
    """x [rows, k] times a weight [n, k]: both read once, the result written once."""
    return Work(bytes=BYTES * (n * k + rows * k + rows * n), flops=2 * rows * k * n)


def qkv_rope_cache(shape: Shape, *, rows: int) -> Work:
    """The projection; q and the rows' k and v written. The rotation is not counted."""
    return product(rows=rows, k=shape.d_model, n=3 * shape.heads * shape.head_dim)


def linear_residual(*, rows: int, k: int, n: int) -> Work:
    """The product alone: the residual is still in the L2."""
    return product(rows=rows, k=k, n=n)


def gate_up_silu(shape: Shape, *, rows: int) -> Work:
    """The product of both halves, of which only the gated half is written."""
    both = product(rows=rows, k=shape.d_model, n=2 * shape.mlp)
    return Work(bytes=both.bytes - BYTES * rows * shape.mlp, flops=both.flops)


def scheduled_attention(shape: Shape, *, rows: int, slots: int, kv_length: int, scores: bool = False) -> Work:
    """One layer: `rows` queries a slot over its cache rows. `scores` adds one fp32 number a cache row to be written."""
    width = shape.heads * shape.head_dim
    kv = 2 * BYTES * slots * kv_length * width
    return Work(bytes=kv + (4 * slots * kv_length if scores else 0), flops=4 * slots * rows * kv_length * width)


def verify_attention(shape: Shape, *, rows: int, slots: int, kv_length: int, scores: bool = False) -> Work:
    """One layer: the cache, one byte a cache row that says whether it is buffered, and the buffer's own k and v."""
    work = scheduled_attention(shape, rows=rows, slots=slots, kv_length=kv_length + rows, scores=scores)
    return Work(bytes=work.bytes + slots * kv_length, flops=work.flops)


def head_statistics(shape: Shape, *, rows: int) -> Work:
    """The logits' product without writing them."""
    logits = product(rows=rows, k=shape.d_model, n=shape.vocab)
    return Work(bytes=logits.bytes - BYTES * rows * shape.vocab, flops=logits.flops)


def forward(shape: Shape, *, rows: int, slots: int, kv_length: int, head_rows: int = 16) -> Work:
    """The whole model: `rows` rows a slot over `kv_length` cache rows, logits for `head_rows` rows a slot (a block).

    Bytes: every matrix but the embedding, and the cache. The activations of few rows stay in the L2; of many rows the
    operations are the floor.
    """
    weights = shape.layers * shape.layer_weights
    head = shape.vocab * shape.d_model
    attention = scheduled_attention(shape, rows=rows, slots=slots, kv_length=kv_length)
    return Work(
        bytes=BYTES * (weights + head) + slots * kv_length * shape.cache_bytes_per_token,
        flops=2 * slots * (rows * weights + head_rows * head) + shape.layers * attention.flops,
    )


def memory(shape: Shape, *, slots: int, kv_length: int) -> float:
    """Bytes of the weights and the cache."""
    weights = shape.layers * shape.layer_weights + 2 * shape.vocab * shape.d_model
    return BYTES * weights + slots * kv_length * shape.cache_bytes_per_token
