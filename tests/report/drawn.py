"""What the tests of figures share: the texts of a page, and that equal input gives equal bytes."""

import xml.etree.ElementTree as ElementTree

import matplotlib


def texts(path):
  """The texts of an SVG file, in order."""
  return [
    "".join(node.itertext()).strip()
    for node in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
  ]


def assert_equal_bytes(draw, folder):
  """draw(path) writes the same two files whatever the user's settings, which it leaves alone."""
  draw(folder / "v1.0")
  with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": None, "font.size": 20}):
    draw(folder / "deep" / "v1.0")
    assert matplotlib.rcParams["font.size"] == 20
  for suffix, signature in ((".svg", b"<?xml"), (".png", b"\x89PNG\r\n\x1a\n")):
    data = (folder / f"v1.0{suffix}").read_bytes()
    assert data.startswith(signature)
    assert data == (folder / "deep" / f"v1.0{suffix}").read_bytes()
    assert b"<dc:date>" not in data
  assert sorted(p.name for p in folder.iterdir()) == ["deep", "v1.0.png", "v1.0.svg"]
