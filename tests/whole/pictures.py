"""The README's pictures, taken out of the committed notebooks: ``python tests/whole/pictures.py`` writes them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SHOWN = {  # name -> notebook, and what the cell that draws it says
    "patching": ("04_patch_activations", "kf.notebook.heatmap("),
    "kill": ("07_break_the_swarm", "kf.notebook.timeline("),
    "tuning": ("06_tune_prompts", "kf.notebook.loss_curve("),
}


def picture(name: str) -> bytes:
    """A picture as it stands in its notebook: the first PNG of the one cell that draws it."""
    notebook, drawn_by = SHOWN[name]
    cells = json.loads((NOTEBOOKS / f"{notebook}.ipynb").read_text())["cells"]
    (cell,) = (cell for cell in cells if cell["cell_type"] == "code" and drawn_by in "".join(cell["source"]))
    (png,) = (output["data"]["image/png"] for output in cell["outputs"] if "image/png" in output.get("data", {}))
    return base64.b64decode("".join(png))


def file(name: str) -> Path:
    return NOTEBOOKS / "pictures" / f"{name}.png"


if __name__ == "__main__":
    for name in SHOWN:
        file(name).parent.mkdir(exist_ok=True)
        file(name).write_bytes(picture(name))
