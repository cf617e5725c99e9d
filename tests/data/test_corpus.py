"""Documents from JSON lines, compressed or not, and from folders of them."""

import gzip
import json
import lzma
import re

import pytest

from moejax.data import Document, read_corpus, read_documents, read_objects

OPENERS = {".jsonl": open, ".jsonl.xz": lzma.open, ".jsonl.gz": gzip.open}
ROWS = [{"id": "a", "text": "why the sheep\n"}, {"text": "朋友 🐑", "language": "zh", "kind": "x"}]


def write(path, rows, between="\n"):
  """JSON lines, compressed as the name says."""
  opener = OPENERS["".join(path.suffixes)]
  with opener(path, "wt", encoding="utf-8") as file:
    file.write("".join(json.dumps(row, ensure_ascii=False) + between for row in rows))
  return path


@pytest.mark.parametrize("suffix", OPENERS)
def test_every_suffix_gives_the_same_objects(tmp_path, suffix):
  path = write(tmp_path / f"some{suffix}", ROWS, between="\n \n")
  assert list(read_objects(path)) == ROWS
  assert list(read_objects(str(path))) == ROWS


def test_documents(tmp_path):
  path = write(tmp_path / "some.jsonl.gz", ROWS)
  assert read_documents(path, "en") == [
    Document("a", "why the sheep\n", "en", "some"),
    Document("2", "朋友 🐑", "zh", "some"),
  ]
  assert {document.source for document in read_documents(path, source="other")} == {"other"}
  assert read_documents(path)[0].language == ""


@pytest.mark.parametrize("name", ["some.json", "some.txt", "some.jsonl.zip", "some"])
def test_other_suffixes(tmp_path, name):
  with pytest.raises(ValueError, match=r"some\S*: expected .jsonl, .jsonl.xz or .jsonl.gz\.$"):
    list(read_objects(tmp_path / name))


@pytest.mark.parametrize("suffix", [".jsonl.xz", ".jsonl.gz"])
@pytest.mark.parametrize("damage", [lambda raw: b"?" + raw, lambda raw: raw[:-9]])
def test_damaged_compression(tmp_path, suffix, damage):
  path = write(tmp_path / f"some{suffix}", ROWS)
  path.write_bytes(damage(path.read_bytes()))
  with pytest.raises(ValueError, match=rf"some{re.escape(suffix)}: damaged: "):
    list(read_objects(path))


def test_text_that_is_not_utf8(tmp_path):
  (tmp_path / "some.jsonl").write_bytes(b'{"text": "\xff"}')
  with pytest.raises(ValueError, match=r"some.jsonl: damaged: "):
    list(read_objects(tmp_path / "some.jsonl"))


@pytest.mark.parametrize("line", ["[1]", "3", '{"text": ', "text"])
def test_lines_that_are_no_objects(tmp_path, line):
  (tmp_path / "some.jsonl").write_text(f'{{"text": "a"}}\n\n{line}\n')
  with pytest.raises(ValueError, match=r"some.jsonl: line 3 is not a JSON object\.$"):
    list(read_objects(tmp_path / "some.jsonl"))


@pytest.mark.parametrize("row", [{}, {"text": ""}, {"text": None}, {"text": ["a"]}])
def test_documents_without_text(tmp_path, row):
  path = write(tmp_path / "some.jsonl", [*ROWS, row])
  with pytest.raises(ValueError, match=r"some.jsonl: object 3 has no text\.$"):
    read_documents(path)


def test_no_documents(tmp_path):
  with pytest.raises(ValueError, match=r"some.jsonl: no documents\.$"):
    read_documents(write(tmp_path / "some.jsonl", []))


@pytest.fixture
def corpus(tmp_path):
  """Three sources in two languages; only two have a test split."""
  sources = {"tales": ("en", ["train", "test"]), "故事": ("zh", ["train", "test"])}
  sources["notes"] = ("en", ["train"])
  entries = {}
  for name, (language, splits) in sources.items():
    files = {split: {"file": f"{name}.{split}.jsonl.xz"} for split in splits}
    entries[name] = {"lang": language, "licence": "CC0-1.0", "splits": files}
    for split in splits:
      with lzma.open(tmp_path / files[split]["file"], "wt", encoding="utf-8") as file:
        file.write(json.dumps({"id": f"{name}-{split}", "text": name}))
  (tmp_path / "manifest.json").write_text(json.dumps({"sources": entries}), encoding="utf-8")
  return tmp_path


@pytest.mark.parametrize(
  "split,filters,ids",
  [
    ("train", {}, ["tales-train", "故事-train", "notes-train"]),
    ("test", {}, ["tales-test", "故事-test"]),
    ("train", {"languages": ["en"]}, ["tales-train", "notes-train"]),
    ("train", {"languages": ["zh", "en"]}, ["tales-train", "故事-train", "notes-train"]),
    ("train", {"sources": ["notes", "故事"]}, ["故事-train", "notes-train"]),
    ("train", {"languages": ["en"], "sources": ["notes"]}, ["notes-train"]),
  ],
)
def test_a_split_in_the_order_of_the_manifest(corpus, split, filters, ids):
  documents = read_corpus(corpus, split, **filters)
  assert [document.id for document in documents] == ids
  languages = {"tales": "en", "故事": "zh", "notes": "en"}
  assert all(document.source == document.text for document in documents)
  assert all(document.language == languages[document.source] for document in documents)


@pytest.mark.parametrize(
  "split,filters,message",
  [
    ("validation", {}, r": no validation documents\.$"),
    ("train", {"sources": ["none"]}, r": no train documents of source 'none'\.$"),
    ("test", {"languages": ["en", "fr"]}, r": no test document in language 'fr'\."),
    ("test", {"languages": ["zh"], "sources": ["tales"]}, r": no test document in language 'zh'\."),
  ],
)
def test_what_a_corpus_lacks(corpus, split, filters, message):
  with pytest.raises(ValueError, match=message):
    read_corpus(corpus, split, **filters)


def test_missing_files(corpus):
  (corpus / "notes.train.jsonl.xz").unlink()
  with pytest.raises(FileNotFoundError, match=r"notes.train.jsonl.xz"):
    read_corpus(corpus, "train")
  assert read_corpus(corpus, "test")
  (corpus / "manifest.json").unlink()
  with pytest.raises(FileNotFoundError, match=r"no corpus in .*: expected manifest.json\.$"):
    read_corpus(corpus, "train")


@pytest.mark.parametrize(
  "content",
  [
    "[",
    "[]",
    "{}",
    '{"sources": []}',
    '{"sources": {"a": {"lang": "en"}}}',
    '{"sources": {"a": {"splits": {"train": {"file": "a.jsonl"}}}}}',
    '{"sources": {"a": {"lang": "en", "splits": {"train": {}}}}}',
  ],
)
def test_damaged_manifests(tmp_path, content):
  (tmp_path / "manifest.json").write_text(content)
  with pytest.raises(ValueError, match=r"manifest.json: expected sources with lang and splits\.$"):
    read_corpus(tmp_path, "train")


def test_a_damaged_body_of_a_gz_file(tmp_path):
  path = tmp_path / "text.jsonl.gz"
  body = bytearray(gzip.compress(b'{"text": "one two three four five six seven"}\n' * 50))
  body[20] ^= 0xFF
  path.write_bytes(bytes(body))
  with pytest.raises(ValueError, match=r"text\.jsonl\.gz: damaged: "):
    read_documents(path)
