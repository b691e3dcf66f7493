"""A driver in a process of its own, to see what it leaves behind: `python -m tests.overseer.ray_driver DIRECTORY`.

Prints the process numbers of two components, then does what it reads, a word a line: `ask` whether both live, `kill`
one of them behind Ray's back and see it noticed, `end` in good order. Neither Ctrl-C nor a terminal that
closes does anything to it.
"""

import os
import signal
import sys
from pathlib import Path

from penstock.overseer.config import RayConfig, RoleConfig
from penstock.overseer.ray import RayLauncher
from penstock.overseer.supervisor.messages import Identity, Membership
from penstock.types import UnreachableError
from tests.overseer import plain_component
from tests.overseer.ray_waiting import running


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    launcher = RayLauncher(
        RayConfig(num_cpus=2, address=os.environ.get("RAY_TEST_ADDRESS")), "driver", Path(sys.argv[1])
    )
    handles = [
        launcher.spawn(Identity("rollout", index, 0), plain_component.make, {}, RoleConfig(), Membership())
        for index in range(2)
    ]
    pids = [running(handle).pid for handle in handles]
    print(*pids, flush=True)
    for line in sys.stdin:
        if line.strip() == "ask":
            print(*(running(handle).condition.state for handle in handles), flush=True)
        elif line.strip() == "kill":
            os.kill(pids[0], signal.SIGKILL)
            try:
                handles[0].call("sleep", 20, timeout_s=30)
            except UnreachableError:
                handles[1].call("speak", "loudly", timeout_s=10)
                print("noticed", flush=True)
        else:
            launcher.close(20)
            break
    print("ended", flush=True)


if __name__ == "__main__":
    main()
