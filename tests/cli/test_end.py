"""The end of a command has a limit, whatever user code left behind."""

import subprocess
import sys

import pytest

LEFT_BEHIND = {
    "a thread": "threading.Thread(target=threading.Event().wait, name='left-behind').start()",
    "an exit handler": "atexit.register(threading.Event().wait)",
}


@pytest.mark.attack
@pytest.mark.parametrize(("what", "named"), [("a thread", "left-behind"), ("an exit handler", "an exit handler")])
def test_what_user_code_left_running_does_not_keep_the_process(what, named):
    script = (
        "import atexit, sys, threading\n"
        "from penstock import cli\n"
        f"cli._LONGEST_END_S = 0.5\n{LEFT_BEHIND[what]}\n"
        "sys.argv = ['penstock', 'no-such-command']\n"
        "sys.exit(cli.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=280)
    assert done.returncode == 2
    assert f"penstock: ended; what still ran after 0.5 s was cut short: {named}" in done.stderr
