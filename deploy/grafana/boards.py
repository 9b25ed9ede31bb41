"""Writes the boards that Grafana is provisioned with: `python deploy/grafana/boards.py [FOLDER]`."""

import json
import sys
from pathlib import Path

from cache import CACHE
from overview import OVERVIEW
from panels import Json

DASHBOARDS = Path(__file__).parent / "dashboards"


def main(folder: Path = DASHBOARDS) -> None:
    boards: dict[str, Json] = {"overview": OVERVIEW, "cache": CACHE}
    for name, content in boards.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
