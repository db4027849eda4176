"""Every preset's numbers in both settings with their sources, copied from the papers by hand.

docs/algorithms.md and the table of presets are compared with this copy. Sources: S = stability
study of arXiv 2602.04879 v3 (App. C.1), L = its scaling runs (App. E), F.3 = its Top-K
ablation, "chosen" = published nowhere. Letters in parentheses name the numbers that a source has: C = ``ratio_cap``,
e = ``smoothing``, d and K = thresholds of a divergence, b = budgets.
"""

INF = float("inf")


def preset(stability, scaling, stability_source, scaling_source):
    """Return the entry of a preset: its numbers in both settings, and where each setting's numbers are published."""
    return stability, scaling, stability_source, scaling_source


PPO_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
STUDY = {"clip_low": 0.2, "clip_high": 0.28}
RUNS = {"clip_low": 0.2, "clip_high": 0.27}
CPPO = {"weight_min": 0.8, "budget_low": 0.02, "budget_high": 0.04, "ratio_cap": INF}
CPPO_KL = {"kl_threshold": 0.05, "weight_min": 0.8, "budget_low": 0.0008, "budget_high": 0.0032,
           "ratio_cap": INF}  # fmt: skip
PDM = {"kl_threshold": 0.15, "ratio_cap": 5.0}
WIDER_TV = {"tv_threshold": 0.2}
OWN = "as in stability"


def alike(source, **numbers):
    """Return the entry of a preset that has the same numbers in both settings."""
    return preset(numbers, numbers, source, OWN)


def capped(stability_source, scaling_source, scaling=None, **numbers):
    """Return the entry of a preset whose ratio is cut only in the scaling runs. ``scaling``: their other numbers."""
    in_runs = {**numbers, **(scaling or {}), "ratio_cap": 5.0}
    return preset({**numbers, "ratio_cap": INF}, in_runs, stability_source, scaling_source)


GOLDEN = {
    "pg-is": preset({"ratio_cap": INF}, {"ratio_cap": INF}, "S", "by its definition"),
    "pg-tis": preset({"ratio_cap": 3.0}, {"ratio_cap": 5.0}, "S", "L"),
    "cispo": preset({"ratio_cap": 3.0}, {"ratio_cap": 5.0}, "S", "L"),
    "ppo": capped("1707.06347, Sec. 6.1 (clip); S (C)", "1707.06347, Sec. 6.1 (clip); L (C)", **PPO_CLIP),
    "grpo": capped("1707.06347, Sec. 6.1 (clip); S (C)", "1707.06347, Sec. 6.1 (clip); L (C)", **PPO_CLIP),
    "grpo-clip-higher": capped("S", "L", RUNS, **STUDY),
    "minirl": capped("S", "chosen (as L's Clip-Higher)", RUNS, **STUDY),
    "minirl-tis": preset(
        {**STUDY, "ratio_cap": 3.0}, {**RUNS, "ratio_cap": 5.0}, "S", "chosen (as L's Clip-Higher)",
    ),
    "dppo-binary-tv": capped("S", "L", WIDER_TV, tv_threshold=0.15),
    "dppo-binary-kl": capped("S", "L", kl_threshold=0.05),
    "dppo-topk-tv": capped("chosen (as Binary's)", "F.3", WIDER_TV, tv_threshold=0.15, topk=20),
    "dppo-topk-kl": capped("chosen (as Binary's)", "F.3", kl_threshold=0.05, topk=20),
    "dppo-exact-tv": capped("chosen (as Binary's)", "chosen (as Top-K's)", WIDER_TV, tv_threshold=0.15),
    "dppo-exact-kl": capped("chosen (as Binary's)", "chosen (as Top-K's)", kl_threshold=0.05),
    "recomputed-exact-tv": capped("chosen (as Binary's)", "chosen (as Top-K's)", WIDER_TV, tv_threshold=0.15),
    "recomputed-exact-kl": capped("chosen (as Binary's)", "chosen (as Top-K's)", kl_threshold=0.05),
    "dppo-decoupled-binary-tv": capped("S", "chosen (as Binary's)", WIDER_TV, tv_threshold=0.15),
    "dppo-decoupled-binary-kl": capped("S", "chosen (as Binary's)", kl_threshold=0.05),
    "mask-0.5": capped("S", "chosen (C as L)", max_drop=0.5),
    "mask-0.8": capped("S", "chosen (C as L)", max_drop=0.8),
    "mask-0.5-recompute": capped("S", "chosen (C as L)", max_drop=0.5),
    "relax-high": capped("efficiency study", "chosen (clip and C as L)", RUNS, **STUDY, rare_below=0.1),
    "relax-low": capped("efficiency study", "chosen (clip and C as L)", RUNS, **STUDY, rare_below=0.1),
    "relax-both": capped("efficiency study", "chosen (clip and C as L)", RUNS, **STUDY, rare_below=0.1),
    "icepop": alike(
        "2510.18855 (band); chosen (clip)", **PPO_CLIP, mismatch_low=0.5, mismatch_high=5.0, ratio_cap=INF,
    ),
    "gspo": alike("2507.18071, Sec. 5.1", clip_low=0.0003, clip_high=0.0004, ratio_cap=INF),
    "drpo": alike("2606.09821, its authors' code", penalty_threshold=12.5, ratio_cap=INF),
    "bpo": alike("2609.15987, second hand (e, C); chosen (clip)", **STUDY, smoothing=0.1, ratio_cap=3.0),
    "cppo-binary-tv": preset(
        {**CPPO, "tv_threshold": 0.15}, {**CPPO, "tv_threshold": 0.2}, "2606.10968 (dense)", "2606.10968 (MoE)",
    ),
    "cppo-topk-tv": preset(
        {**CPPO, "tv_threshold": 0.15, "topk": 20}, {**CPPO, "tv_threshold": 0.2, "topk": 20},
        "2606.10968 (dense)", "2606.10968 (MoE)",
    ),
    "cppo-binary-kl": alike("chosen (d as DPPO's, b as 2 TV^2)", **CPPO_KL),
    "cppo-topk-kl": alike("chosen (d as DPPO's, b as 2 TV^2)", **CPPO_KL, topk=20),
    "pdm-aggregated": alike("2607.10848, second hand", **PDM, topk=20),
    "pdm-uniform": alike("2607.10848, second hand", **PDM, topk=20),
    "pdm-tail": alike("chosen (as the other two's)", **PDM, topk=20),
    "pdm-exact": alike("chosen (as Top-K's)", **PDM),
    "dppo-symmetric": alike("prime-rl's default", tv_threshold=0.3, ratio_cap=INF),
    "kpop": alike("its note, second hand", kl_threshold=0.1, ratio_cap=INF),
    "sapo": alike("2511.20347, public code", tau_positive=1.0, tau_negative=1.05, ratio_cap=INF),
    "gmpo": alike("2507.20673, public code", log_clip=0.4, ratio_cap=INF),
    "minpro": alike("chosen", ratio_cap=5.0),
    "trm-max": alike("chosen", largest_k2=2.0, ratio_cap=INF),
    "trm-mean": alike("chosen (as DPPO's KL)", mean_k3=0.05, ratio_cap=INF),
    "geometric-mask": alike(
        "SkyRL's documentation (band); chosen (clip)", **PPO_CLIP, sequence_low=0.99, sequence_high=1.01, ratio_cap=2.0,
    ),
    "m2po": alike("2510.01161, its authors' code", second_moment=0.04, ratio_cap=INF),
    "m2po-areal": alike("AReaL's example", second_moment=0.04, ratio_cap=INF),
    "vaco": alike("open-instruct's documentation; chosen (clip)", **PPO_CLIP, largest_shift=2.0, ratio_cap=2.0),
    "score-centering": alike("2609.20807, second hand", ratio_cap=2.0, topk=32),
    "off-policy-sequence-mask": alike("chosen", drift_threshold=0.1, ratio_cap=INF),
    "triage": alike(
        "2610.07043, its authors' code", **STUDY, ratio_cap=2.0, gate_segment=64, repair_segment=128, repair=0.015,
    ),
    "troll": alike(
        "2510.03817, its authors' code; chosen (K as DPPO's)", kl_bound=0.05, regression=1.0, topk=20, ratio_cap=INF,
    ),
}  # fmt: skip
