"""The notebooks run from top to bottom, and are stored without what they printed."""

import pathlib

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))


def test_there_are_notebooks():
  assert [path.stem for path in NOTEBOOKS] == ["one_sum_720_orders"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# The kernel's own machinery warns on some Pythons; what a cell warns of is not seen here anyway.
@pytest.mark.filterwarnings("default")
def test_a_notebook_runs_and_is_stored_without_outputs(path):
  notebook = nbformat.read(path, as_version=4)
  cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
  assert all(not cell.outputs and cell.execution_count is None for cell in cells)
  nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": ROOT}}).execute()
  printed = "".join(out.get("text", "") for cell in cells for out in cell.outputs)
  assert "720 orders" in printed
  assert "texts, orders in each" in printed
