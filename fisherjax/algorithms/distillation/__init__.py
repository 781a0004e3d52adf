"""Methods whose server or clients train on generated images, and distillation into one model."""
