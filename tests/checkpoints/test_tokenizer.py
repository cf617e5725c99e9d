"""Text to ids and back, with BOS exactly where a model has it."""

import hashlib
import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from moejax.checkpoints import Tokenizer

BOS, EOS = 257, 258


def make(directory, config=None):
  """A byte-level tokenizer whose own files would add BOS and EOS, and cut and fill batches."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocab = {token: i for i, token in enumerate([*alphabet, "th"])}
  backend = tokenizers.Tokenizer(models.BPE(vocab, [("t", "h")]))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens(["<s>", "</s>"])
  backend.post_processor = processors.TemplateProcessing(
    single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
  )
  backend.enable_truncation(4)
  backend.enable_padding(length=64, pad_id=EOS)
  directory.mkdir(exist_ok=True)
  backend.save(str(directory / "tokenizer.json"))
  if config is not None:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
  return directory


def test_raw_text_comes_back(tmp_path):
  tokenizer = Tokenizer.from_directory(make(tmp_path))
  text = " the sheep, why\n\tétait 朋友 🐑 "
  ids = tokenizer.encode(text)
  assert all(type(i) is int for i in ids) and BOS not in ids and EOS not in ids
  # One token per byte but for "th": nothing added, cut or filled.
  assert len(ids) == len(text.encode()) - 1
  assert tokenizer.decode(ids) == text
  assert tokenizer.vocab_size == 259


@pytest.mark.parametrize(
  "config,adds",
  [
    (None, False),
    ({}, False),
    ({"add_bos_token": True}, True),
    ({"add_bos_token": False}, False),
    ({"add_bos_token": None}, False),
    ({"tokenizer_class": "LlamaTokenizerFast"}, True),
    ({"tokenizer_class": "LlamaTokenizer", "add_bos_token": None}, True),
    ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, False),
    ({"tokenizer_class": "Qwen2Tokenizer", "bos_token": "<s>"}, False),
    ({"tokenizer_class": "GPTNeoXTokenizer", "add_bos_token": True}, True),
  ],
)
@pytest.mark.parametrize("token", [None, "<s>", {"content": "<s>", "lstrip": False}])
def test_bos(tmp_path, config, adds, token):
  if config is not None and token is not None:
    config = {**config, "bos_token": token}
  make(tmp_path, config)
  named = config is not None and token is not None
  # The token's own id goes before that of config.json.
  tokenizer = Tokenizer.from_directory(tmp_path, bos_id=7 if named else BOS)
  plain = [*tokenizer.encode("then")]
  assert tokenizer.bos_id == (BOS if adds else None)
  assert (plain[0] == BOS) == adds and len(plain) == 3 + adds
  assert tokenizer.decode(plain) == "then"


@pytest.mark.parametrize("config", [{}, {"bos_token": "<nowhere>"}])
def test_bos_that_nothing_names(tmp_path, config):
  make(tmp_path, {"add_bos_token": True, **config})
  with pytest.raises(ValueError, match=r"asks for BOS, but its token .* has no id"):
    Tokenizer.from_directory(tmp_path)


def test_empty_prompt(tmp_path):
  tokenizer = Tokenizer.from_directory(make(tmp_path, {"add_bos_token": True}), BOS)
  with pytest.raises(ValueError, match=r"the prompt is empty"):
    tokenizer.encode("")
  assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("token", [259, -1, 2**40])
def test_ids_beyond_the_vocabulary(tmp_path, token):
  tokenizer = Tokenizer.from_directory(make(tmp_path))
  assert tokenizer.unknown([0, token, 1]) == [token]
  assert tokenizer.decode([0, token, 1]) == f"{tokenizer.decode([0])}\ufffd{tokenizer.decode([1])}"


def test_no_tokenizer(tmp_path):
  with pytest.raises(FileNotFoundError, match=r"no tokenizer in .*: expected tokenizer.json"):
    Tokenizer.from_directory(tmp_path)


def test_damaged_files(tmp_path):
  make(tmp_path, {})
  (tmp_path / "tokenizer_config.json").write_text("[")
  with pytest.raises(ValueError, match=r"tokenizer_config.json: expected a JSON object"):
    Tokenizer.from_directory(tmp_path)
  (tmp_path / "tokenizer_config.json").unlink()
  (tmp_path / "tokenizer.json").write_text('{"model": ')
  with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer: "):
    Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("config", [None, {"add_bos_token": True, "bos_token": "<s>"}])
def test_saved_as_it_was_read(tmp_path, config):
  tokenizer = Tokenizer.from_directory(make(tmp_path / "a", config))
  tokenizer.save(tmp_path / "b")
  contents = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
  assert {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()} == contents
  again = Tokenizer.from_directory(tmp_path / "b")
  assert again.encode("a") == tokenizer.encode("a")
  assert again.sha256 == hashlib.sha256(contents["tokenizer.json"]).hexdigest()
