"""The libraries' kernels, each given what suits it best: for decode contiguous caches or pages of 64, of known lengths.

PyTorch's by backend, FlashAttention-3, and of FlashInfer its own two kernels and XQA (TensorRT-LLM's). A library that
is not here, or does not take a shape, is left out of it with the reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from common.timing import Backend, sdpa
from common.timing.peers import FA3, FA3_MODULE, fa3_version, import_peer
from task5.ladder.benchmark import BF16, FP16, FP32, Call, Inputs, Prepare

PAGE = 64
WORKSPACE = 256 << 20  # bytes
ONE_QUERY = "it takes one query of a sequence"


@dataclass(frozen=True)
class Peer:
    """A library's kernel."""

    label: str
    dtypes: Sequence[torch.dtype]
    prepare: Prepare


def _on_caches(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Prepare:
    return lambda inputs: [partial(attend, inputs.q, k, v) for k, v in inputs.caches]


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def _grouped(q: Tensor, k: Tensor, v: Tensor, *, backend: Backend) -> Tensor:
    """For backends without grouped heads: the heads of a group as queries of one head; (batch, kv_heads, group, d)."""
    queries = q.view(q.shape[0], k.shape[2], -1, q.shape[3]).transpose(1, 2)
    return sdpa(queries, k, v, backend=backend).transpose(1, 2)


def _fa3(inputs: Inputs) -> list[Call]:
    used = {"causal": inputs.shape.q_len > 1}
    if len(set(inputs.shape.lengths)) > 1:
        used["cache_seqlens"] = inputs.lengths

    def attend(k: Tensor, v: Tensor) -> Tensor:
        out = import_peer(FA3_MODULE).flash_attn_with_kvcache(inputs.q, k, v, **used)
        return out[0] if isinstance(out, tuple) else out

    return [partial(attend, k, v) for k, v in inputs.caches]


def _flashinfer(inputs: Inputs, *, tensor_cores: bool) -> list[Call]:
    shape, (table, caches) = inputs.shape, inputs.pages(PAGE)
    device = table.device
    each = (inputs.lengths + PAGE - 1) // PAGE  # pages of a sequence
    indices = torch.cat([table[b, :n] for b, n in enumerate(each.tolist())])
    indptr = torch.nn.functional.pad(each.cumsum(0, dtype=torch.int32), (1, 0))
    last = (inputs.lengths - 1) % PAGE + 1
    sizes = (shape.heads, shape.kv_heads, shape.head_dim, PAGE)
    dtypes = dict(q_data_type=shape.dtype, kv_data_type=shape.dtype)
    if shape.q_len > 1:
        if not tensor_cores:
            raise ValueError(ONE_QUERY)
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        prefill = import_peer("flashinfer").BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        ends = torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * shape.q_len
        prefill.plan(ends, indptr, indices, last, *sizes, causal=True, **dtypes)
        return [partial(prefill.run, inputs.q.flatten(0, 1), pair) for pair in caches]
    wrapper = import_peer("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(WORKSPACE, dtype=torch.uint8, device=device), "NHD", use_cuda_graph=True,
        use_tensor_cores=tensor_cores, paged_kv_indptr_buffer=indptr.clone(),
        paged_kv_indices_buffer=indices.clone(), paged_kv_last_page_len_buffer=last.clone(),
    )  # fmt: skip
    wrapper.plan(indptr, indices, last, *sizes, **dtypes)
    return [partial(wrapper.run, inputs.q[:, 0], pair) for pair in caches]  # it holds its buffers


def _xqa(inputs: Inputs) -> list[Call]:
    shape, (table, caches) = inputs.shape, inputs.pages(PAGE)
    if shape.q_len > 1:
        raise ValueError(ONE_QUERY)
    import_peer("flashinfer")
    decode = import_peer("flashinfer.decode").trtllm_batch_decode_with_kv_cache
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=table.device)
    options = dict(bmm1_scale=shape.head_dim**-0.5, bmm2_scale=1.0, kv_layout="NHD", backend="xqa")
    given = (workspace, table, inputs.lengths, shape.kv_len)
    return [partial(decode, inputs.q[:, 0], pair, *given, **options) for pair in caches]


_HALVES = (BF16, FP16)  # FlashInfer compiles its kernels here, for each dtype: one is enough
PEERS = (
    *(
        Peer(b.value, (FP32,), _on_caches(partial(_grouped, backend=b)))
        for b in (Backend.MATH, Backend.EFFICIENT)
    ),
    Peer(Backend.CUDNN.value, _HALVES, _on_caches(_cudnn)),
    Peer(FA3.label, _HALVES, _fa3),
    Peer("FlashInfer, tensor cores", (BF16,), partial(_flashinfer, tensor_cores=True)),
    Peer("FlashInfer", (BF16,), partial(_flashinfer, tensor_cores=False)),
    Peer("XQA", (BF16,), _xqa),
)
LABELS = tuple(peer.label for peer in PEERS)
# Those that take a length of each sequence.
LENGTH_PEERS = {peer.label: peer.prepare for peer in PEERS if "SDPA" not in peer.label}


def _causal(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, backend: SDPBackend) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


def _sdpa_flash(inputs: Inputs) -> list[Call]:
    mask = causal_lower_right(inputs.shape.q_len, inputs.shape.kv_len)
    return _on_caches(partial(_causal, mask=mask, backend=SDPBackend.FLASH_ATTENTION))(inputs)


def _sdpa_cudnn(inputs: Inputs) -> list[Call]:
    q_len, kv_len = inputs.shape.q_len, inputs.shape.kv_len
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=inputs.q.device)
    mask = seen.tril_(kv_len - q_len)
    return _on_caches(partial(_causal, mask=mask, backend=SDPBackend.CUDNN_ATTENTION))(inputs)


def _fa3_chunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = import_peer(FA3_MODULE).flash_attn_with_kvcache(q, k, v, causal=True)
    return out[0] if isinstance(out, tuple) else out


def _flashinfer_chunk(inputs: Inputs) -> list[Call]:
    shape, flashinfer = inputs.shape, import_peer("flashinfer")
    if shape.batch == 1:
        attend = partial(flashinfer.single_prefill_with_kv_cache, causal=True, kv_layout="NHD")
        return [partial(attend, inputs.q[0], k[0], v[0]) for k, v in inputs.caches]
    ends = torch.arange(shape.batch + 1, dtype=torch.int32, device=inputs.q.device)
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=inputs.q.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        ends * shape.q_len, ends * shape.kv_len, shape.heads, shape.kv_heads, shape.head_dim,
        causal=True, q_data_type=shape.dtype,
    )  # fmt: skip
    q = inputs.q.flatten(0, 1)
    return [partial(wrapper.run, q, k.flatten(0, 1), v.flatten(0, 1)) for k, v in inputs.caches]


CHUNK_PEERS = {
    Backend.FLASH.value: _sdpa_flash,
    Backend.CUDNN.value: _sdpa_cudnn,
    FA3.label: _on_caches(_fa3_chunk),
    "FlashInfer": _flashinfer_chunk,
}


def peer_sides(dtype: torch.dtype) -> dict[str, Prepare]:
    """How the peers that take this dtype are called, by label."""
    return {peer.label: peer.prepare for peer in PEERS if dtype in peer.dtypes}


def versions() -> dict[str, str]:
    """Of the libraries beside PyTorch, by name; or that one cannot be imported."""
    try:
        flashinfer = import_peer("flashinfer").__version__
    except ImportError as error:
        flashinfer = str(error)
    return {FA3.label: fa3_version(), "FlashInfer": flashinfer}
