"""Speed and memory on this machine: what is measured, how, and under which conditions. Prints nothing."""
