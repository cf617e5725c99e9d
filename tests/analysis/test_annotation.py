"""Annotation: what a form shows, what a filled one may hold, volumes, and draws that stay."""

import csv
import random

import pytest

from moejax.analysis import annotation
from moejax.analysis.annotation import ClassText, Item, Labelled

TEXTS = [
  "，说他们公司要裁员，他",
  "，说他们公司要招人，问我",
  '"quoted", with a comma',
  "two\nlines",
  "three\r\nlines\rindeed",
  " spaces around ",
  "",
]


def philox(key: tuple[int, int], count: int) -> list[int]:
  """Philox4x64-10 of Salmon et al. (2011) in plain integers, counting from 1 as NumPy does."""
  mask, words, counter = 2**64 - 1, [], 0
  while len(words) < count:
    counter += 1
    x, k = [counter, 0, 0, 0], list(key)
    for _ in range(10):
      first, second = x[0] * 0xD2E7470EE14C6C93, x[2] * 0xCA5A826395121157
      x = [
        (second >> 64) ^ x[1] ^ k[0],
        second & mask,
        (first >> 64) ^ x[3] ^ k[1],
        first & mask,
      ]
      k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    words += x
  return words[:count]


def order(count: int, seed: int, stream: int = 0) -> list[int]:
  words = philox((seed, stream), count)
  return sorted(range(count), key=lambda index: words[index])


def filled(form: list[Item], label, source: str = "person") -> list[Labelled]:
  """`label` is a function of the text."""
  return [Labelled(item.item, item.text, label(item.text), source) for item in form]


def cells(form: list[Item]) -> list[list[str]]:
  """A filled form, as rows of CSV, header first."""
  return [["item", "text", "label"], *([str(i), text, "other"] for i, text in form)]


def write(path, rows, encoding="utf-8", **dialect):
  with open(path, "w", encoding=encoding, newline="") as file:
    csv.writer(file, **dialect).writerows(rows)
  return path


def test_a_form_is_the_unique_texts_in_the_order_of_the_generator():
  form = annotation.blind_form(TEXTS, 41)
  unique = sorted(TEXTS)
  assert form == [(n + 1, unique[index]) for n, index in enumerate(order(len(TEXTS), 41))]
  assert [item.text for item in form] != unique
  assert form != annotation.blind_form(TEXTS, 42)
  assert Item._fields == ("item", "text")


def test_a_form_tells_nothing_of_branches_or_frequencies():
  shuffler = random.Random(0)
  for _ in range(5):
    branches = TEXTS + shuffler.choices(TEXTS, k=30)
    shuffler.shuffle(branches)
    assert annotation.blind_form(branches, 41) == annotation.blind_form(TEXTS, 41)


def test_a_form_comes_back_as_it_went(tmp_path):
  form = annotation.blind_form(TEXTS, 3)
  path = tmp_path / "forms" / "blind.csv"
  annotation.write_form(path, form)
  assert annotation.read_form(path, form) == filled(form, lambda text: "")
  assert [file.name for file in path.parent.iterdir()] == ["blind.csv"]
  assert '"two\nlines"' in path.read_bytes().decode("utf-8")


def test_a_table_that_fails_leaves_the_old_one(tmp_path):
  path = tmp_path / "key.csv"
  annotation.write_csv(path, ClassText._fields, [ClassText(0, 2, "a\nb")])
  before = path.read_bytes()
  assert before == b'"class_id","orders","text"\n"0","2","a\nb"\n'

  def rows():
    yield (1, 2, "c")
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    annotation.write_csv(path, ClassText._fields, rows())
  assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
  "encoding,dialect",
  [
    ("utf-8", {}),
    ("utf-8-sig", dict(lineterminator="\r\n")),
    ("utf-8", dict(quoting=csv.QUOTE_ALL, lineterminator="\n\n")),
  ],
)
def test_a_filled_form_may_be_sorted_and_saved_by_a_spreadsheet(tmp_path, encoding, dialect):
  form = annotation.blind_form(TEXTS, 5)
  header, *rows = cells(form)
  rows[2][2], rows[3][2] = " hiring\t", "  "
  path = write(tmp_path / "filled.csv", [header, *reversed(rows)], encoding, **dialect)
  read = annotation.read_form(path, form)
  assert [row[:2] for row in read] == form
  assert [row.label for row in read] == ["other", "other", "hiring", "", "other", "other", "other"]
  assert {row.source for row in read} == {"person"}


def edit(row: int, column: int, value: str):
  def change(rows):
    rows[row][column] = value

  return change


@pytest.mark.parametrize(
  "change,message",
  [
    (edit(3, 2, "firing"), "item 3 has the label 'firing', expected one of .'hiring', 'layoffs'"),
    (edit(3, 2, "Hiring"), "item 3 has the label 'Hiring'"),
    (edit(4, 1, "another"), "the text of item 4 was changed: 'another'"),
    (edit(4, 0, "8"), "item '8' is not in the form"),
    (edit(4, 0, "4.0"), "item '4.0' is not in the form"),
    (lambda rows: rows.pop(7), "item 7 is missing"),
    (lambda rows: rows.append(rows[2]), "item 2 is there twice"),
    (lambda rows: rows[5].append("?"), "row 5 has 4 cells for 3 columns"),
    (lambda rows: rows[5].pop(), "row 5 has 2 cells for 3 columns"),
    (lambda rows: rows.pop(0), "columns are .'1', .*, expected .'item', 'text', 'label'."),
    (lambda rows: rows.clear(), "columns are .., expected"),
  ],
)
def test_bad_forms_are_refused(tmp_path, change, message):
  form = annotation.blind_form(TEXTS, 5)
  rows = cells(form)
  annotation.read_form(write(tmp_path / "good.csv", rows), form)
  change(rows)
  with pytest.raises(ValueError, match=message):
    annotation.read_form(write(tmp_path / "bad.csv", rows), form)


@pytest.mark.parametrize(
  "text,changed", [(" spaces around ", "spaces around"), (TEXTS[4], "three\nlines\nindeed")]
)
def test_a_text_counts_as_changed_by_white_space_alone(tmp_path, text, changed):
  form = annotation.blind_form(TEXTS, 5)
  rows = [[changed if cell == text else cell for cell in row] for row in cells(form)]
  item = next(item.item for item in form if item.text == text)
  with pytest.raises(ValueError, match=f"the text of item {item} was changed"):
    annotation.read_form(write(tmp_path / "filled.csv", rows), form)


def test_another_encoding_is_refused(tmp_path):
  form = annotation.blind_form(TEXTS, 5)
  path = write(tmp_path / "filled.csv", cells(form), "gbk")
  with pytest.raises(ValueError, match=r"filled\.csv: not UTF-8"):
    annotation.read_form(path, form)


def test_labels_may_be_others(tmp_path):
  form = annotation.blind_form(["a", "b"], 0)
  path = write(tmp_path / "f.csv", [["item", "text", "label"], [*form[0], "up"], [*form[1], ""]])
  assert [row.label for row in annotation.read_form(path, form, ("up", "down"))] == ["up", ""]
  with pytest.raises(ValueError, match="item 1 has the label 'up'"):
    annotation.read_form(path, form)


def rule(text: str) -> str:
  return "layoffs" if "裁" in text else "hiring" if "招" in text else "other"


def test_labels_of_a_rule_say_so_in_every_row():
  form = annotation.blind_form(TEXTS, 1)
  rows = annotation.apply_rule(form, rule)
  assert rows == filled(form, rule, "rule")
  assert {row.label for row in rows} == {"hiring", "layoffs", "other"}
  key = [ClassText(number, 2, text) for number, text in enumerate(TEXTS)]
  assert {row.source for row in annotation.label_classes([rows], key)} == {"rule"}
  assert {row.source for row in annotation.score_forms([rows], key)} == {"rule"}
  with pytest.raises(ValueError, match="rule: item 1 has the label 'up'"):
    annotation.apply_rule(form, lambda text: "up")


# The texts of nine classes; d is left blank by one, c disagreed on, e left blank by both.
KEY = [
  ClassText(class_id, orders, text)
  for class_id, orders, text in zip(range(100, 109), [2, 2, 2, 1, 2, 3, 2, 2, 2], "aabbccdea")
]
FIRST = dict(a="hiring", b="layoffs", c="other", d="hiring", e="")
SECOND = dict(a="hiring", b="layoffs", c="hiring", d="", e="")


def both() -> list[list[Labelled]]:
  form = annotation.blind_form("abcde", 0)
  return [filled(form, FIRST.get), filled(form, SECOND.get)]


def test_volumes_are_hand_worked():
  assert annotation.score_forms(both(), KEY) == [
    ("person", "labelled", "hiring", 1, 3, 6),
    ("person", "labelled", "layoffs", 1, 2, 3),
    ("person", "labelled", "other", 0, 0, 0),
    ("person", "unlabelled", "", 2, 2, 4),
    ("person", "disagreeing", "", 1, 2, 5),
  ]
  alone = annotation.score_forms(both()[:1], KEY)
  assert [row.classes for row in alone] == [4, 2, 2, 1, 0]


def test_classes_get_the_label_of_their_exact_text():
  rows = annotation.label_classes(both(), KEY)
  assert [row[:3] for row in rows] == KEY
  assert [row.label for row in rows] == ["hiring"] * 2 + ["layoffs"] * 2 + [""] * 4 + ["hiring"]
  status = {row.text: row.status for row in rows}
  assert status == dict(a="labelled", b="labelled", c="disagreeing", d="unlabelled", e="unlabelled")


def test_of_three_two_that_differ_disagree_whatever_the_third():
  form = annotation.blind_form("abcde", 0)
  forms = [*both(), filled(form, lambda text: "")]
  status = {row.text: row.status for row in annotation.label_classes(forms, KEY)}
  assert status == dict.fromkeys("abde", "unlabelled") | dict(c="disagreeing")


def test_forms_that_do_not_fit_are_refused():
  first, second = both()
  as_rule = [row._replace(source="rule") for row in second]
  for forms, key, message in [
    ([], KEY, "no labelled items"),
    ([[]], KEY, "no labelled items"),
    ([first, second[:-1]], KEY, "form 1 has other items than form 0"),
    ([first, second[::-1]], KEY, "form 1 has other items than form 0"),
    ([first, as_rule], KEY, "labels of persons and of a rule are mixed"),
    ([first], [*KEY, ClassText(103, 2, "a")], "class 103 is in the key twice"),
    ([first], [*KEY, ClassText(200, 2, "a ")], "text of class 200 is not in the forms"),
  ]:
    with pytest.raises(ValueError, match=message):
      annotation.score_forms(forms, key)
  item = next(row.item for row in first if row.text == "e")
  with pytest.raises(ValueError, match=f"text of item {item} belongs to no class"):
    annotation.score_forms([first], [row for row in KEY if row.text != "e"])
  with pytest.raises(ValueError, match="class 100 has the label 'hiring', expected one of"):
    annotation.score_forms([first], KEY, ("layoffs", "other"))


def strata(seed: int = 0, classes: int = 360) -> dict[int, str]:
  """The sizes of the paper: 202 layoffs, 110 hiring, 48 other, in a random place each."""
  labels = ["layoffs"] * 202 + ["hiring"] * 110 + ["other"] * 48
  random.Random(seed).shuffle(labels)
  return dict(enumerate(labels[:classes]))


def test_a_draw_is_that_of_the_generator_in_plain_integers():
  labels = strata()
  expected = []
  for stream, stratum in enumerate(("layoffs", "hiring")):
    classes = [class_id for class_id in range(360) if labels[class_id] == stratum]
    expected += [classes[index] for index in order(len(classes), 20260723, stream)[:5]]
  drawn = annotation.stratified_draw(labels)
  assert drawn == expected and len(set(drawn)) == 10
  assert [labels[class_id] for class_id in drawn] == ["layoffs"] * 5 + ["hiring"] * 5


def test_a_draw_depends_on_labels_and_seed_only():
  labels = strata(1)
  drawn = annotation.stratified_draw(labels)
  assert drawn == annotation.stratified_draw(dict(reversed(labels.items())))
  assert drawn != annotation.stratified_draw(labels, seed=20260724)
  # Classes that leave one stratum do not disturb the other.
  fewer = {
    class_id: label for class_id, label in labels.items() if label != "layoffs" or class_id % 2
  }
  assert annotation.stratified_draw(fewer)[5:] == drawn[5:]
  # A longer draw begins with the shorter one.
  assert annotation.stratified_draw(labels, ("layoffs",), per_stratum=9)[:5] == drawn[:5]


def test_every_class_has_its_chance():
  labels = dict.fromkeys(range(7), "x")
  times = [0] * 7
  for seed in range(700):
    for class_id in annotation.stratified_draw(labels, ("x",), seed=seed, per_stratum=2):
      times[class_id] += 1
  # 200 expected each, standard deviation 12.
  assert all(150 < count < 250 for count in times)


def test_a_small_stratum_is_refused():
  labels = {0: "layoffs", 1: "layoffs", 2: "hiring"}
  assert annotation.stratified_draw(labels, per_stratum=1)[1] == 2
  with pytest.raises(ValueError, match="stratum 'hiring' has 1 classes, expected at least 2"):
    annotation.stratified_draw(labels, per_stratum=2)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed):
  with pytest.raises(ValueError, match=f"the seed is {seed}, expected 0 to"):
    annotation.blind_form(TEXTS, seed)
