"""Head ablation and the Dyck study: running them, and their results beside a recording."""

from visitlens.moved import from_module

__getattr__ = from_module(__name__, "results.store")
