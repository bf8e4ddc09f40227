"""The official path of the audio encoder, whose class is not part of this package."""

raise ImportError(
    "wan.modules.s2v.audio_encoder is not part of this package; use "
    "wan.modules.audio_encoder.extract_audio_features, or wan.WanS2V, which reads the audio itself."
)
