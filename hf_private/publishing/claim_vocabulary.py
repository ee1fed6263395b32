"""The words by which `claims` knows an epsilon, the number that belongs to it, and epsilons of other kinds."""

EPSILON = frozenset("epsilon epsilons eps ε".split())
DELTA = frozenset("delta deltas δ".split())
PRIVATE = frozenset("budget differential differentially dp guarantee privacy private privately zcdp".split())
OTHER_NOTIONS = {"zcdp": ("rho", frozenset("rho ρ".split())), "gdp": ("mu", frozenset("mu μ".split()))}
BUDGET = frozenset("budget cost guarantee level loss parameter spent value".split())  # after "privacy" or "DP"

# Words and signs between a name and its number that do not change what the number is
FILLERS = frozenset(
    """
    a about achieve achieved achieves almost an and approx approximately around as at be being below bound
    bounded budget by cost delta dp equal equaling equalling equals exactly exceed exceeding example final get
    guarantee guaranteed here is just less level loss low lower merely metric metrics most name nearly not of
    only our parameter per person privacy reach reached reaches record roughly sample set small smaller spent
    than the this tiny to total type under up upper user value values very was we were with δ
    """.split()
)
JOINTS = frozenset("=≈≤<~:,()|\"'/-→&;!?")
DIRECT = frozenset("at equals is level of".split())  # after "DP" or "privacy" alone
ATTACHED = frozenset("- = ≥ > as for is of".split())  # between a number and the epsilon after it

UNITS = frozenset(  # a whole number of these is a count
    """
    accountant accountants bit bits checkpoint checkpoints class classes day days decimal decimals device
    devices digit digits epoch epochs example examples fold gpu gpus hour hours layer layers minute minutes
    model models people person phase phases rank ranks record records run runs second seconds seed seeds step
    steps times token tokens user users
    """.split()
)

CARDINALS = {
    word: float(value)
    for value, word in enumerate("zero one two three four five six seven eight nine ten eleven twelve".split())
}
PARTS = {"half": 0.5, "third": 1 / 3, "quarter": 0.25, "fifth": 0.2, "tenth": 0.1, "tenths": 0.1, "hundredth": 0.01}
AFTER_CARDINAL = frozenset("and at delta for or per with δ".split())  # otherwise "one" is no number: "one of them"

# Beginnings of words that tell epsilons for numerical stability, and epsilons of other kinds
NUMERICAL = tuple(
    """
    adafactor adagrad adam batchnorm beta bn groupnorm lamb layernorm lion ln norm numerical optim rmsnorm
    rmsprop stability
    """.split()
)
OTHER = tuple(
    """
    adversarial attack ball clip convergence dbscan exploration fgsm greedy insensitive machine neighborhood
    neighbourhood perturbation pgd smoothing svm svr tolerance
    """.split()
)
