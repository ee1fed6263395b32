"""What a model predicts: a loss per record, batches in which records do not meet, and made-up batches."""
