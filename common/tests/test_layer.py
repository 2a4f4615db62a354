"""AttentionLayer: the convention of torch.nn.Linear, and one tensor for the weights of q, k and v."""

import copy
import io
from collections import Counter

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from common.check import Rng, assert_close
from common.layer import AttentionLayer

HIDDEN, HEADS = 48, 3
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES)
def rng(request):
    return Rng(request.config.getoption("--seed"), request.param, "layer")


def make_mha(rng):
    mha = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True, device=rng.device)
    for parameter in mha.requires_grad_(False).parameters():
        parameter.copy_(rng.randn(*parameter.shape, scale=HIDDEN**-0.5))
    return mha


def arguments(mha, bias=True):
    """The layer's arguments, as the course takes them from a MultiheadAttention."""
    weights = *mha.in_proj_weight.chunk(3), mha.out_proj.weight
    biases = (*mha.in_proj_bias.chunk(3), mha.out_proj.bias) if bias else ()
    return *weights, HIDDEN, HEADS, *biases


def is_one_tensor(layer):
    """Whether q's, k's and v's weights, and their biases, follow each other in the storage of their parameter."""
    pairs = [(layer.w_qkv, (layer.w_q, layer.w_k, layer.w_v))]
    if layer.b_qkv is not None:
        pairs.append((layer.b_qkv, (layer.b_q, layer.b_k, layer.b_v)))
    return all(
        part.data_ptr() == whole.data_ptr() + i * part.numel() * part.element_size()
        for whole, parts in pairs
        for i, part in enumerate(parts)
    )


@pytest.mark.parametrize("given", ["none", "q", "k", "v", "qv", "qkv"])
@pytest.mark.parametrize("b_o", [False, True])
def test_projections_are_those_of_linear(rng, given, b_o):
    weights = [rng.randn(HIDDEN, HIDDEN, scale=HIDDEN**-0.5) for _ in range(4)]
    biases = [rng.randn(HIDDEN) if n in given else None for n in "qkv"]
    biases.append(rng.randn(HIDDEN) if b_o else None)
    layer = AttentionLayer(*weights, HIDDEN, HEADS, *biases)
    x = rng.randn(2, 5, HIDDEN)
    outputs = *layer.project_qkv(x), layer.project_output(x)
    for got, weight, bias in zip(outputs, weights, biases, strict=True):
        truth = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert_close(got, truth, F.linear(x, weight, bias), axes=("batch", "row", "column"))
    for name, weight in zip(("w_q", "w_k", "w_v", "w_o"), weights, strict=True):
        assert torch.equal(getattr(layer, name), weight), name
    for name, bias in zip(("b_q", "b_k", "b_v", "b_o"), biases, strict=True):
        if bias is not None:
            assert torch.equal(getattr(layer, name), bias), name
    assert (layer.b_qkv is None) == (given == "none")
    assert is_one_tensor(layer)


def test_weights_of_a_multihead_attention_are_shared(rng):
    mha = make_mha(rng)
    layer = AttentionLayer(*arguments(mha))
    assert is_one_tensor(layer)
    theirs = mha.in_proj_weight, mha.in_proj_bias, mha.out_proj.weight, mha.out_proj.bias
    for own, their in zip((layer.w_qkv, layer.b_qkv, layer.w_o, layer.b_o), theirs, strict=True):
        assert own.data_ptr() == their.data_ptr() and torch.equal(own, their)


def separate_weights(what, rng):
    """w_q, w_k, w_v that do not follow each other in memory."""
    n = HIDDEN
    whole = rng.randn(4 * n, n)
    match what:
        case "separate":
            return [rng.randn(n, n) for _ in "qkv"]
        case "reordered":
            return [whole[n : 2 * n], whole[:n], whole[2 * n : 3 * n]]
        case "apart":
            return [whole[:n], whole[n : 2 * n], whole[3 * n :]]
        case "transposed":
            return [w.T for w in whole[: 3 * n].chunk(3)]
        case "strided":
            return list(rng.randn(3 * n, 2 * n)[:, :n].chunk(3))


@pytest.mark.parametrize("what", ["separate", "reordered", "apart", "transposed", "strided"])
def test_other_weights_are_copied_once_and_not_kept(rng, what):
    weights = separate_weights(what, rng)
    expected = [w.clone() for w in weights]
    given = [StorageWeakRef(w.untyped_storage()) for w in weights]
    layer = AttentionLayer(*weights, rng.randn(HIDDEN, HIDDEN), HIDDEN, HEADS)
    del weights
    assert all(ref.expired() for ref in given), "the layer keeps a tensor that it copied"
    assert is_one_tensor(layer)
    assert all(map(torch.equal, (layer.w_q, layer.w_k, layer.w_v), expected))
    elements = layer.w_qkv.untyped_storage().nbytes() // layer.w_qkv.element_size()
    assert elements == 3 * HIDDEN**2, "the storage holds more than the weights"


def to_dtype(layer):
    return layer.to(torch.bfloat16)


def to_meta_and_back(layer):
    state, device = layer.state_dict(), layer.w_o.device
    moved = layer.to("meta").to_empty(device=device)
    moved.load_state_dict(state)
    return moved


def saved_and_loaded(layer):
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(layer)
    for parameter in other.parameters():
        parameter.zero_()
    other.load_state_dict(torch.load(file))
    return other


def assigned(layer):
    other = copy.deepcopy(layer)
    other.load_state_dict({k: v.clone() for k, v in layer.state_dict().items()}, assign=True)
    return other


@pytest.mark.parametrize(
    "change", [to_dtype, copy.deepcopy, to_meta_and_back, saved_and_loaded, assigned]
)
@pytest.mark.parametrize("shared", [True, False])
def test_one_tensor_stays_one(rng, change, shared):
    mha = make_mha(rng)
    given = [a if shared or isinstance(a, int) else a.clone() for a in arguments(mha)]
    layer = change(AttentionLayer(*given))
    assert is_one_tensor(layer)
    assert set(layer.state_dict()) == {"w_qkv", "b_qkv", "w_o", "b_o"}
    assert [*layer.parameters()] and not any(p.requires_grad for p in layer.parameters())
    for own, value in zip((layer.w_q, layer.w_k, layer.w_v, layer.w_o), given[:4], strict=True):
        assert torch.equal(own, value.to(own.dtype)) and own.device == value.device
    for own, value in zip((layer.b_q, layer.b_k, layer.b_v, layer.b_o), given[6:], strict=True):
        assert torch.equal(own, value.to(own.dtype))


@pytest.mark.parametrize("bias", [False, True])
def test_q_k_and_v_are_slices_of_one_product(rng, bias):
    layer = AttentionLayer(*arguments(make_mha(rng), bias))
    x = rng.randn(2, 5, HIDDEN)
    ran = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            ran[function.overloadpacket._qualified_op_name] += 1
            return function(*args, **(kwargs or {}))

    with Count():
        q, k, v = layer.project_qkv(x)
    products = sum(n for name, n in ran.items() if name in ("aten::mm", "aten::addmm", "aten::bmm"))
    assert products == 1, f"one matrix product was expected; these operations ran: {dict(ran)}"
    storages = {t.untyped_storage().data_ptr() for t in (q, k, v)}
    assert len(storages) == 1
    assert q.shape == k.shape == v.shape == x.shape
    assert q.stride() == k.stride() == v.stride() == (5 * 3 * HIDDEN, 3 * HIDDEN, 1)


@pytest.mark.parametrize(
    "change", [None, copy.deepcopy, to_meta_and_back, saved_and_loaded, assigned]
)
def test_products_on_tensor_cores_are_an_option_without_a_trace(rng, change):
    hidden = HIDDEN if rng.device.type == "cpu" else 1024
    weights = [rng.randn(hidden, hidden, scale=hidden**-0.5) for _ in range(4)]
    b_o = rng.randn(hidden)
    plain = AttentionLayer(*weights, hidden, HEADS if hidden == HIDDEN else 8, b_o=b_o)
    layer = AttentionLayer(
        *weights, hidden, HEADS if hidden == HIDDEN else 8, b_o=b_o, products="tensor cores"
    )
    assert layer.state_dict().keys() == plain.state_dict().keys()
    x = rng.randn(2, 700, hidden)
    layer.project_qkv(x)
    if change:
        layer = change(layer)
    exact = plain.double()
    for got, theirs, truth in zip(
        (*layer.project_qkv(x), layer.project_output(x)),
        (*F.linear(x, layer.w_qkv).chunk(3, -1), F.linear(x, layer.w_o, b_o)),
        (*exact.project_qkv(x.double()), exact.project_output(x.double())),
        strict=True,
    ):
        assert_close(got, truth, theirs, axes=("batch", "row", "column"))


def test_products_have_a_name(rng):
    weights = [rng.randn(HIDDEN, HIDDEN) for _ in range(4)]
    with pytest.raises(
        ValueError, match="products must be 'torch' or 'tensor cores'; got 'precise'"
    ):
        AttentionLayer(*weights, HIDDEN, HEADS, products="precise")
