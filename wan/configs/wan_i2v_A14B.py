"""The official configuration of i2v-A14B."""

from wan.configs import WAN_CONFIGS

i2v_A14B = WAN_CONFIGS["i2v-A14B"]
