"""What has been spent: the ledger, the budget that is left, and the statement privacy.json."""
