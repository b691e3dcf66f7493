"""Writes docs/config.md, the reference of all configuration keys, from the models.

python scripts/make_config_page.py
"""

import argparse
from pathlib import Path

from penstock.overseer.config_loading.reference import page

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
