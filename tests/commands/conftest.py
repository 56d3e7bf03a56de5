"""A tiny model of random weights in a folder, and command lines run in this process."""

from __future__ import annotations

import io

import pytest
import torch
from cli_world import WORDS, Result, Run
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from outrider.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama of two layers that knows a few words."""
    place = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(3)
    vocab = {word: i for i, word in enumerate(["<unk>", "<end>", *WORDS])}
    config = LlamaConfig(
        vocab_size=len(vocab), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.3, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(place)
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<end>").save_pretrained(place)
    return str(place)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line in this process, with an empty stdin: exit code, stdout, stderr."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    disable_progress_bar()  # in a process of its own, the command line sees to it before transformers is imported

    def run(*args: str) -> Result:
        capfd.readouterr()
        return Result(main(args), *capfd.readouterr())

    return run
