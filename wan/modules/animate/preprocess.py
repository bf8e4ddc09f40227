"""The official path of the preprocessing, which is not part of this package."""

raise ImportError(
    "wan.modules.animate.preprocess is not part of this package; run preprocess_data.py of "
    "Wan-Video/Wan2.2 and give its folder with --src_root_path (docs/animate.md)."
)
