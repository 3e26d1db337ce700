"""How the pipeline is watched from outside: log lines with ids, and metrics as Prometheus text. Decides nothing."""
