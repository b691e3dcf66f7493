"""What several commands share."""

from rich.table import Table

from penstock.cli.arguments import text_console


def test_names_and_paths_are_printed_as_they_are(capsys):
    """Rich would take the brackets for a style, and the word between colons for a picture."""
    table = Table("task")
    table.add_row("a[lr=1]")
    console = text_console()
    console.print("run directory  runs/x[seed=1]:car:", soft_wrap=True)
    console.print(table)
    out = capsys.readouterr().out
    assert "runs/x[seed=1]:car:\n" in out and "a[lr=1]" in out
