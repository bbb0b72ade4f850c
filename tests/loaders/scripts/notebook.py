"""Runs a notebook in a Jupyter kernel and prints the output of its cells. ``notebook.py FOLDER CELL...``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

folder, *cells = sys.argv[1:]
# uses none of the user's files
for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
    os.environ[name] = str(Path(folder) / name.lower())

from nbclient import NotebookClient  # noqa: E402 - reads the environment
from nbformat.v4 import new_code_cell, new_notebook  # noqa: E402

notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
printed = [[output.get("text", "") for output in cell.outputs] for cell in notebook.cells]
print(json.dumps(["".join(texts) for texts in printed]))
