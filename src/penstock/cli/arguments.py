"""Arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes to the configuration, as dotted keys.", show_default=False),
]
Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="A run's checkpoints/step-<n>, or a Hugging Face directory.")
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Believe what a run directory says that others than you may have written.")
]
