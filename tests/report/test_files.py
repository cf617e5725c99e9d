"""Files are whole or absent; tables refuse what they could not read back."""

import pytest

from moejax.report import files, tables


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
  path = tmp_path / "deep" / "table.tsv"
  tables.write_tsv(path, ("a", "b"), [(1, "x")])
  with pytest.raises(ZeroDivisionError), files.atomic_path(path) as temporary:
    temporary.write_text("half")
    _ = 1 / 0
  assert path.read_text() == "a\tb\n1\tx\n"
  assert [p.name for p in path.parent.iterdir()] == ["table.tsv"]


def test_rows_come_back_as_they_were(tmp_path):
  path = tmp_path / "t.tsv"
  tables.write_tsv(path, ("text", "number"), [("朋友 said", 1.5), ("", 2)])
  assert tables.read_tsv(path) == [
    {"text": "朋友 said", "number": "1.5"},
    {"text": "", "number": "2"},
  ]


@pytest.mark.parametrize(
  "row,message",
  [(("a\tb", 1), "may not hold a tab"), (("a\nb", 1), "line break"), (("a",), "1 cells for 2")],
)
def test_rows_that_would_not_come_back_are_refused(tmp_path, row, message):
  with pytest.raises(ValueError, match=message):
    tables.write_tsv(tmp_path / "t.tsv", ("text", "number"), [row])
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "text,message",
  [
    ("", "expected a header row"),
    ("a\tb\n1\n", "line 2 has 1 cells"),
    ("a\tb\n1\t2", "not finished"),
  ],
)
def test_damaged_tables_are_refused(tmp_path, text, message):
  path = tmp_path / "t.tsv"
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    tables.read_tsv(path)
