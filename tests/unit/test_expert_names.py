"""Which of two experts a file's name states: one rule for DiTs and LoRAs."""

from __future__ import annotations

from pathlib import Path

from wan.checkpoint.names.expert_names import detect_experts

HIGH, LOW = "high_noise", "low_noise"


def experts(*names: str) -> list[str | None]:
    """The expert of each file, where all files are passed together."""
    expert_marks = detect_experts([Path("/data", name) for name in names])
    return [None if mark is None else mark.expert for mark in expert_marks.values()]


ALONE = {
    **dict.fromkeys(("style_high", "StyleHigh", "style-HIGH", "T2VHighV2", "WAN22_HIGHv2"), HIGH),
    **dict.fromkeys(("Instagirlv2.0_hinoise", "wan22highnoise", "high.noise", "W22_i2v_HN"), HIGH),
    **dict.fromkeys(("style_low", "StyleLow", "style.low.v2", "i2v-LN", "t2vLowNoise_Q4"), LOW),
    **dict.fromkeys(("Wan22_HIGH_Lightning_4steps", "x_HIGH_lora", "x_high_lora_v2"), HIGH),
    **dict.fromkeys(("low_light_high_noise", "high_noise_for_low_vram"), HIGH),
    **dict.fromkeys(("highway_style", "slow_motion", "yellow", "below", "yellow_noise"), None),
    **dict.fromkeys(("lowpoly", "low-poly", "LowPoly", "highres", "HighRes", "high_quality"), None),
    **dict.fromkeys(("wan_low_vram", "HIGH_QUALITY", "HIGHRes", "x_high_lightning"), None),
    **dict.fromkeys(("style_l", "style_H", "H264", "wan-Q5_K_L", "i2v_low_rank_64"), None),
    **dict.fromkeys(("high_low_combo", "high_noise_low_noise", "HIGHWAY", "HighFantasy"), None),
}


def test_a_name_alone() -> None:
    assert {name: experts(f"{name}.safetensors")[0] for name in ALONE} == ALONE


PAIRS = (
    ("a/style_h.safetensors", "a/style_l.safetensors"),
    ("a/style_H-000010.safetensors", "b/style_L-000020.safetensors"),
    ("a/x_high_quality.safetensors", "a/x_low_quality.safetensors"),
    ("a/wan_high_lightning_4steps.safetensors", "a/wan_low_lightning_4steps.safetensors"),
    ("a/say_hi.safetensors", "a/say_lo.safetensors"),
    ("high/adapter_model.safetensors", "low/adapter_model.safetensors"),
    ("a/H/c/x.safetensors", "a/L/c/x.safetensors"),
    ("fox_H.safetensors", "fox_low.safetensors"),
)


def test_a_doubtful_mark_counts_with_its_counterpart() -> None:
    for pair in PAIRS:
        assert experts(*pair) == [HIGH, LOW], pair
        assert experts(pair[0]) == [None], pair


def test_a_letter_of_another_name_is_no_counterpart() -> None:
    assert experts("fox_H.safetensors", "wolf_L.safetensors") == [None, None]
    three = "x_high_noise.safetensors", "x_low_noise.safetensors", "style_l.safetensors"
    assert experts(*three) == [HIGH, LOW, None]


def test_the_name_counts_before_the_folder() -> None:
    assert experts("low_noise/style_high.safetensors") == [HIGH]
    assert experts("low_noise/style.safetensors") == [LOW]
    assert experts("low/style.safetensors") == [None], "somebody's folder"
    inside = detect_experts([Path("/low_noise/c/low/wan.gguf")], Path("/low_noise/c"))
    assert [mark and mark.expert for mark in inside.values()] == [LOW], "of the checkpoint"
    for name, expert in (("low/b/x_high.gguf", HIGH), ("high_noise/low/x.gguf", LOW)):
        (mark,) = detect_experts([Path("/c") / name], Path("/c")).values()
        assert mark and mark.expert == expert, "the nearest to the file counts"
