"""Labels of the fixed axes, for writers and readers. No torch."""

STAGES = ("X", "Q", "K", "V", "PV", "O")
Q_STAGES = ("Q", "PV")
KV_STAGES = ("K", "V")
COMPONENTS = ("update", "attn_write", "moe_write", "norm_output_attn", "norm_output_moe")
