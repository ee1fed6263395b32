"""The epsilon of private steps, and how much noise a budget allows.

The names are here, without imports, so that the command line can list them quickly.
"""

ACCOUNTANT_NAMES = ("prv", "pld", "rdp")  # the rows of `accountants.ACCOUNTANTS`
LAWS = ("fixed", "geometric", "logarithmic")  # how the number of tuning runs is chosen, see composition.py
