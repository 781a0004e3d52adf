"""Read, write and merge LoRA adapters in the folders of peft."""
