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
ICEPOP = {"mismatch_low": 0.5, "mismatch_high": 5.0, "clip_low": 0.2, "clip_high": 0.2,
          "ratio_cap": INF}  # fmt: skip
GSPO = {"clip_low": 0.0003, "clip_high": 0.0004, "ratio_cap": INF}
BPO = {"smoothing": 0.1, "clip_low": 0.2, "clip_high": 0.28, "ratio_cap": 3.0}
CPPO = {"weight_min": 0.8, "budget_low": 0.02, "budget_high": 0.04, "ratio_cap": INF}
CPPO_KL = {"kl_threshold": 0.05, "weight_min": 0.8, "budget_low": 0.0008, "budget_high": 0.0032,
           "ratio_cap": INF}  # fmt: skip
PDM = {"kl_threshold": 0.15, "ratio_cap": 5.0}
DRPO = {"penalty_threshold": 12.5, "ratio_cap": INF}
OWN = "as in stability"

GOLDEN = {
    "pg-is": preset({"ratio_cap": INF}, {"ratio_cap": INF}, "S", "by its definition"),
    "pg-tis": preset({"ratio_cap": 3.0}, {"ratio_cap": 5.0}, "S", "L"),
    "cispo": preset({"ratio_cap": 3.0}, {"ratio_cap": 5.0}, "S", "L"),
    "ppo": preset(
        {**PPO_CLIP, "ratio_cap": INF}, {**PPO_CLIP, "ratio_cap": 5.0},
        "1707.06347, Sec. 6.1 (clip); S (C)", "1707.06347, Sec. 6.1 (clip); L (C)",
    ),
    "grpo": preset(
        {**PPO_CLIP, "ratio_cap": INF}, {**PPO_CLIP, "ratio_cap": 5.0},
        "1707.06347, Sec. 6.1 (clip); S (C)", "1707.06347, Sec. 6.1 (clip); L (C)",
    ),
    "grpo-clip-higher": preset({**STUDY, "ratio_cap": INF}, {**RUNS, "ratio_cap": 5.0}, "S", "L"),
    "minirl": preset(
        {**STUDY, "ratio_cap": INF}, {**RUNS, "ratio_cap": 5.0}, "S", "chosen (as L's Clip-Higher)"
    ),
    "minirl-tis": preset(
        {**STUDY, "ratio_cap": 3.0}, {**RUNS, "ratio_cap": 5.0}, "S", "chosen (as L's Clip-Higher)"
    ),
    "dppo-binary-tv": preset(
        {"tv_threshold": 0.15, "ratio_cap": INF}, {"tv_threshold": 0.2, "ratio_cap": 5.0}, "S", "L"
    ),
    "dppo-binary-kl": preset(
        {"kl_threshold": 0.05, "ratio_cap": INF}, {"kl_threshold": 0.05, "ratio_cap": 5.0}, "S", "L"
    ),
    "dppo-topk-tv": preset(
        {"tv_threshold": 0.15, "topk": 20, "ratio_cap": INF},
        {"tv_threshold": 0.2, "topk": 20, "ratio_cap": 5.0}, "chosen (as Binary's)", "F.3",
    ),
    "dppo-topk-kl": preset(
        {"kl_threshold": 0.05, "topk": 20, "ratio_cap": INF},
        {"kl_threshold": 0.05, "topk": 20, "ratio_cap": 5.0}, "chosen (as Binary's)", "F.3",
    ),
    "dppo-exact-tv": preset(
        {"tv_threshold": 0.15, "ratio_cap": INF}, {"tv_threshold": 0.2, "ratio_cap": 5.0},
        "chosen (as Binary's)", "chosen (as Top-K's)",
    ),
    "dppo-exact-kl": preset(
        {"kl_threshold": 0.05, "ratio_cap": INF}, {"kl_threshold": 0.05, "ratio_cap": 5.0},
        "chosen (as Binary's)", "chosen (as Top-K's)",
    ),
    "recomputed-exact-tv": preset(
        {"tv_threshold": 0.15, "ratio_cap": INF}, {"tv_threshold": 0.2, "ratio_cap": 5.0},
        "chosen (as Binary's)", "chosen (as Top-K's)",
    ),
    "recomputed-exact-kl": preset(
        {"kl_threshold": 0.05, "ratio_cap": INF}, {"kl_threshold": 0.05, "ratio_cap": 5.0},
        "chosen (as Binary's)", "chosen (as Top-K's)",
    ),
    "dppo-decoupled-binary-tv": preset(
        {"tv_threshold": 0.15, "ratio_cap": INF}, {"tv_threshold": 0.2, "ratio_cap": 5.0},
        "S", "chosen (as Binary's)",
    ),
    "dppo-decoupled-binary-kl": preset(
        {"kl_threshold": 0.05, "ratio_cap": INF}, {"kl_threshold": 0.05, "ratio_cap": 5.0},
        "S", "chosen (as Binary's)",
    ),
    "mask-0.5": preset(
        {"max_drop": 0.5, "ratio_cap": INF}, {"max_drop": 0.5, "ratio_cap": 5.0},
        "S", "chosen (C as L)",
    ),
    "mask-0.8": preset(
        {"max_drop": 0.8, "ratio_cap": INF}, {"max_drop": 0.8, "ratio_cap": 5.0},
        "S", "chosen (C as L)",
    ),
    "mask-0.5-recompute": preset(
        {"max_drop": 0.5, "ratio_cap": INF}, {"max_drop": 0.5, "ratio_cap": 5.0},
        "S", "chosen (C as L)",
    ),
    **{
        name: preset(
            {**STUDY, "rare_below": 0.1, "ratio_cap": INF},
            {**RUNS, "rare_below": 0.1, "ratio_cap": 5.0},
            "efficiency study", "chosen (clip and C as L)",
        )
        for name in ("relax-high", "relax-low", "relax-both")
    },
    "icepop": preset(ICEPOP, ICEPOP, "2510.18855 (band); chosen (clip)", OWN),
    "gspo": preset(GSPO, GSPO, "2507.18071, Sec. 5.1", OWN),
    "drpo": preset(DRPO, DRPO, "2606.09821, its authors' code", OWN),
    "bpo": preset(BPO, BPO, "2609.15987, second hand (e, C); chosen (clip)", OWN),
    "cppo-binary-tv": preset(
        {**CPPO, "tv_threshold": 0.15}, {**CPPO, "tv_threshold": 0.2},
        "2606.10968 (dense)", "2606.10968 (MoE)",
    ),
    "cppo-topk-tv": preset(
        {**CPPO, "tv_threshold": 0.15, "topk": 20}, {**CPPO, "tv_threshold": 0.2, "topk": 20},
        "2606.10968 (dense)", "2606.10968 (MoE)",
    ),
    "cppo-binary-kl": preset(CPPO_KL, CPPO_KL, "chosen (d as DPPO's, b as 2 TV^2)", OWN),
    "cppo-topk-kl": preset(
        {**CPPO_KL, "topk": 20}, {**CPPO_KL, "topk": 20}, "chosen (d as DPPO's, b as 2 TV^2)", OWN
    ),
    "pdm-aggregated": preset({**PDM, "topk": 20}, {**PDM, "topk": 20}, "2607.10848, second hand", OWN),
    "pdm-uniform": preset({**PDM, "topk": 20}, {**PDM, "topk": 20}, "2607.10848, second hand", OWN),
    "pdm-tail": preset({**PDM, "topk": 20}, {**PDM, "topk": 20}, "chosen (as the other two's)", OWN),
    "pdm-exact": preset(PDM, PDM, "chosen (as Top-K's)", OWN),
    "dppo-symmetric": preset(
        {"tv_threshold": 0.3, "ratio_cap": INF}, {"tv_threshold": 0.3, "ratio_cap": INF},
        "prime-rl's default", OWN,
    ),
    "kpop": preset(
        {"kl_threshold": 0.1, "ratio_cap": INF}, {"kl_threshold": 0.1, "ratio_cap": INF},
        "its note, second hand", OWN,
    ),
    "sapo": preset(
        {"tau_positive": 1.0, "tau_negative": 1.05, "ratio_cap": INF},
        {"tau_positive": 1.0, "tau_negative": 1.05, "ratio_cap": INF},
        "2511.20347, public code", OWN,
    ),
    "gmpo": preset(
        {"log_clip": 0.4, "ratio_cap": INF}, {"log_clip": 0.4, "ratio_cap": INF},
        "2507.20673, public code", OWN,
    ),
    "minpro": preset({"ratio_cap": 5.0}, {"ratio_cap": 5.0}, "chosen", OWN),
    "trm-max": preset(
        {"largest_k2": 2.0, "ratio_cap": INF}, {"largest_k2": 2.0, "ratio_cap": INF}, "chosen", OWN
    ),
    "trm-mean": preset(
        {"mean_k3": 0.05, "ratio_cap": INF}, {"mean_k3": 0.05, "ratio_cap": INF},
        "chosen (as DPPO's KL)", OWN,
    ),
    "geometric-mask": preset(
        {"sequence_low": 0.99, "sequence_high": 1.01, **PPO_CLIP, "ratio_cap": 2.0},
        {"sequence_low": 0.99, "sequence_high": 1.01, **PPO_CLIP, "ratio_cap": 2.0},
        "SkyRL's documentation (band); chosen (clip)", OWN,
    ),
    "m2po": preset(
        {"second_moment": 0.04, "ratio_cap": INF}, {"second_moment": 0.04, "ratio_cap": INF},
        "2510.01161, its authors' code", OWN,
    ),
    "m2po-areal": preset(
        {"second_moment": 0.04, "ratio_cap": INF}, {"second_moment": 0.04, "ratio_cap": INF},
        "AReaL's example", OWN,
    ),
    "vaco": preset(
        {"largest_shift": 2.0, **PPO_CLIP, "ratio_cap": 2.0},
        {"largest_shift": 2.0, **PPO_CLIP, "ratio_cap": 2.0},
        "open-instruct's documentation; chosen (clip)", OWN,
    ),
    "score-centering": preset(
        {"ratio_cap": 2.0, "topk": 32}, {"ratio_cap": 2.0, "topk": 32}, "2609.20807, second hand", OWN
    ),
    "off-policy-sequence-mask": preset(
        {"drift_threshold": 0.1, "ratio_cap": INF}, {"drift_threshold": 0.1, "ratio_cap": INF},
        "chosen", OWN,
    ),
    "triage": preset(
        {**STUDY, "ratio_cap": 2.0, "gate_segment": 64, "repair_segment": 128, "repair": 0.015},
        {**STUDY, "ratio_cap": 2.0, "gate_segment": 64, "repair_segment": 128, "repair": 0.015},
        "2610.07043, its authors' code", OWN,
    ),
    "troll": preset(
        {"kl_bound": 0.05, "regression": 1.0, "topk": 20, "ratio_cap": INF},
        {"kl_bound": 0.05, "regression": 1.0, "topk": 20, "ratio_cap": INF},
        "2510.03817, its authors' code; chosen (K as DPPO's)", OWN,
    ),
}  # fmt: skip
