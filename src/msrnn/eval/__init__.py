"""The paper's evaluation: a task is data and three functions, a run of it yields records, one JSON line each."""
