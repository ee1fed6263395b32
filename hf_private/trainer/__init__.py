"""DPTrainer and its callback: the seam with the Hugging Face Trainer."""
