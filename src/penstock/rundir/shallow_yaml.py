"""PyYAML's safe loader for documents of people and of Penstock, which are not nested deeply.

PyYAML looks at every open bracket for every one that follows, so a hundred thousand of them take it most of a minute.
"""

import yaml

MOST_BRACKETS = 200
"""That may be open at the same time."""


class ShallowLoader(yaml.SafeLoader):
    """Refuses what is nested deeper than `MOST_BRACKETS`, where it stands."""

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:  # noqa: N803
        """Called by the scanner at every opening bracket."""
        if self.flow_level >= MOST_BRACKETS:
            raise yaml.MarkedYAMLError(
                problem=f"it is nested too deeply: more than {MOST_BRACKETS} brackets", problem_mark=self.get_mark()
            )
        super().fetch_flow_collection_start(TokenClass)
