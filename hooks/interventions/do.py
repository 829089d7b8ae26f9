"""`vl.do` names what can be done to a model while it runs, after Pearl's do-operator: a value is set, and the rest
follows from it.

    with vl.intervene(model, vl.do.take("V", source=1, visit=2), vl.do.zero("PV", layer=3, visit=2, head=1)):
        logits = model(tokens, segments)

`zero`, `mean`, `resample`, `scale`, `add`, `project_out`: the value itself, changed. `take` (from an earlier visit),
`swap` (two visits), `replace` (from another run): another value. `skip`: a visit writes nothing. `knock_out_sink`: no
attention to the segment start. `generated`: tokens that a model wrote. `site_means`, `with_loop_count`: what some of
them need.

Examples:
    >>> model = vl.load("smelt")
    >>> run = model.run("Two visits of one layer.")
    >>> frozen = run.with_(vl.do.take("V", visit=2))  # visit 2 gets the values of visit 1
    >>> bool((frozen.logits == run.logits).all())
    False
"""

from visitlens.hooks.interventions.intervene import (
    Intervention,
    add,
    generated,
    intervene,
    knock_out_sink,
    mean,
    project_out,
    replace,
    resample,
    scale,
    site_means,
    skip,
    swap,
    take,
    with_loop_count,
    zero,
)

__all__ = [
    "Intervention",
    "add",
    "generated",
    "intervene",
    "knock_out_sink",
    "mean",
    "project_out",
    "replace",
    "resample",
    "scale",
    "site_means",
    "skip",
    "swap",
    "take",
    "with_loop_count",
    "zero",
]
