"""Runners of tasks that do not depend on each other: this process, processes of this machine, or Ray on several."""
