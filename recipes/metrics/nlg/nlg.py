"""BLEU, ROUGE-L, NIST, CIDEr and, if WordNet is installed, METEOR against several references, without the Hub."""

import math
from collections import Counter

import datasets
import evaluate
from nltk.translate.meteor_score import meteor_score
from nltk.translate.nist_score import corpus_nist
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

ORDER = 4


class Nlg(evaluate.Metric):
    """Corpus scores of generated texts: lower case, tokens of mteval-v13a, all references of a text at once.

    The script of the E2E challenge tokenizes slightly differently, so compare with papers to one digit only.
    """

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        features = datasets.Features({"predictions": text, "references": datasets.List(text)})
        return evaluate.MetricInfo(description=__doc__, citation="", features=features)

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, float]:
        most = max(map(len, references))
        streams = [[refs[i] if i < len(refs) else None for refs in references] for i in range(most)]
        rouge = RougeScorer(["rougeL"], use_stemmer=False)
        pairs = list(zip(references, predictions, strict=True))
        rouge_l = [rouge.score_multi(refs, text)["rougeL"].fmeasure for refs, text in pairs]
        tokens = Tokenizer13a()
        guessed = [tokens(text.lower()).split() for text in predictions]
        wanted = [[tokens(ref.lower()).split() for ref in refs] for refs in references]
        scores = {
            "bleu": BLEU(lowercase=True).corpus_score(predictions, streams).score,
            "rouge_l": 100 * sum(rouge_l) / len(rouge_l),
            "nist": nist(wanted, guessed),
            "cider": cider(wanted, guessed),
        }
        try:
            meteor = [meteor_score(refs, text) for refs, text in zip(wanted, guessed, strict=True)]
            scores["meteor"] = 100 * sum(meteor) / len(meteor)
        except LookupError:  # WordNet is a separate download: nltk.download("wordnet")
            pass
        return scores


def nist(wanted: list[list[list[str]]], guessed: list[list[str]]) -> float:
    """NIST of orders up to 5; 0 if the corpus is too short."""
    try:
        return float(corpus_nist(wanted, guessed, 5))
    except ZeroDivisionError:
        return 0.0


def ngrams(tokens: list[str]) -> list[Counter]:
    """Counts of n-grams by order 1 to ORDER."""
    return [Counter(zip(*(tokens[i:] for i in range(n)), strict=False)) for n in range(1, ORDER + 1)]


def cider(wanted: list[list[list[str]]], guessed: list[list[str]]) -> float:
    """CIDEr (Vedantam et al. 2015), not CIDEr-D: mean cosine of TF-IDF n-gram vectors, times 10.

    A document is all the references of one text. Without stemming, as is usual.
    """
    document_frequency: Counter = Counter()
    counts = [[ngrams(ref) for ref in refs] for refs in wanted]
    for refs in counts:
        document_frequency.update({gram for ref in refs for order in ref for gram in order})
    documents = math.log(len(wanted)) if len(wanted) > 1 else 1.0

    def vector(order: Counter) -> dict[tuple, float]:
        total = sum(order.values())
        return {
            gram: count / total * (documents - math.log(max(document_frequency[gram], 1)))
            for gram, count in order.items()
        }

    def cosine(a: dict[tuple, float], b: dict[tuple, float]) -> float:
        norms = math.hypot(*a.values()) * math.hypot(*b.values())
        return sum(value * b.get(gram, 0.0) for gram, value in a.items()) / norms if norms else 0.0

    scores = []
    for refs, text in zip(counts, guessed, strict=True):
        own = [vector(order) for order in ngrams(text)]
        each = [sum(cosine(a, vector(b)) for a, b in zip(own, ref, strict=True)) / ORDER for ref in refs]
        scores.append(10 * sum(each) / len(each))
    return sum(scores) / len(scores)
