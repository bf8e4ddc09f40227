"""The network of speech to video."""

from wan.modules.s2v.model_s2v import WanModel_S2V as WanModel_S2V
