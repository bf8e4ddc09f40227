"""The official configuration of ti2v-5B."""

from wan.configs import WAN_CONFIGS

ti2v_5B = WAN_CONFIGS["ti2v-5B"]
