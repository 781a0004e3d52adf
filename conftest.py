"""Leave out the examples of modules whose extra is not installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("flwr") else ["fisherjax/flower/*"]
# Apps that Flower loads under another name.
collect_ignore_glob += ["experiments/flower/app/*", "experiments/flower/load/app/*"]
