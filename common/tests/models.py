"""What the tests of GPT-2's texts share: a model, errors planted in it, a folder of it to spoil, and the command."""

import logging
import shutil

import pytest
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface
from transformers.utils import logging as transformers_logging

from task7 import inference
from task7.attention import NAME, course_attention
from task7.inference import TINY, ModelWithCustomAttention

PROMPTS = ("Once upon a time there was", "Why?", "One morning, Mira walked to")


@pytest.fixture(scope="module")
def model():
    return ModelWithCustomAttention(TINY, device="cpu")


@pytest.fixture
def planted():
    """A function that plants an error: calls of layer 1 that ``where`` accepts return what ``spoil`` makes of them."""

    def plant(spoil, where=lambda q: True):
        def wrong(module, query, *args, **options):
            out, weights = course_attention(module, query, *args, **options)
            if module.layer_idx == 1 and where(query):
                out = spoil(out)
            return out, weights

        AttentionInterface.register(NAME, wrong)

    yield plant
    AttentionInterface.register(NAME, course_attention)


@pytest.fixture
def said_by_transformers(caplog, monkeypatch):
    """What its logger would write to stderr, also if it has said it before."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    transformers_logging.warning_once.cache_clear()
    return caplog


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(inference.TINY_FOLDER, tmp_path / "model")


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def command(*arguments):
    inference.run(["--model", TINY, "--device", "cpu", *arguments], NAME, "")
