"""The network of Animate."""

from wan.modules.animate.model_animate import WanAnimateModel as WanAnimateModel
