"""An optimiser's states from look to look: second moments that were reset or cast, counters that stand."""

import math

import torch

from .adapters import steps_of
from .sums import totals


class States:
    """answers: an optimiser that answers, see adapters.answering. facts: [facts.Facts of each tensor]. pick:
    tensor -> its sample, [n]. What is found stands in the facts.
    """

    def __init__(self, answers, facts, pick):
        self.answers = answers
        self.facts = facts
        self.pick = pick
        self.last = None  # (step, numbers of tensors, lengths, exp_avg_sq after it) of the last look
        self.weights = {}  # {number of a tensor: what it held after that look}
        self.looked_at = {}  # {number of a tensor: the step of its last look}
        self.passed_by = False  # whether a call did nothing: one that sums up gradients steps at some alone
        self.put_back: set[int] = set()  # of this look's tensors those whose state is an earlier one

    def of(self, p):
        """What the optimiser keeps for a parameter, a dict."""
        answers = self.answers.owner[p] if hasattr(self.answers, "owner") else self.answers
        state = getattr(answers, "inner", answers).state
        return state.get(p, {})

    # -- second moments

    def find_resets(self, look, step, has_gradient):
        """Find second moments that are less than beta2 leaves of them: 0 beside an exp_avg, 0 in all tensors
        after steps, or entries far below those of the last look. has_gradient: [bool of each tensor].
        """
        sums = totals([look.v], look.lengths)[0].tolist()
        # how a stranger forms it may not be known
        betas = [self.answers.decay(p, "exp_avg_sq")[0] for p in look.params]
        keeps_v = [
            dtype is not None and not math.isnan(beta)
            for dtype, beta in zip(look.v_dtypes, betas, strict=True)
        ]
        here = [k for k in range(len(sums)) if keeps_v[k] and has_gradient[k]]
        all_zero = not any(sums[k] for k in here)
        fell = self._fell(look, step)
        reset = []
        for k in here:
            p, facts = look.params[k], self.facts[look.index[k]]
            if sums[k] == 0 and (self._beside_a_momentum(p) or (all_zero and steps_of(self.of(p)))):
                facts.begun_anew = self._begun_anew(look, k, 1.0)
                if self.last is None and facts.begun_anew and steps_of(self.of(p)) == 1:
                    facts.counted_empty = True
                    continue
                facts.v_reset = step, None
                reset.append(k)
            elif fell[k] > 0.1 and k not in self.put_back:
                facts.v_reset = step, fell[k]
                facts.begun_anew = self._begun_anew(look, k, fell[k])
                reset.append(k)
        self._compare_weights(look, reset)

    def find_restarts(self, look, step):
        """Find what began anew with counters that fell since the last look, or was put back to an earlier
        state: its counter has counted more steps than there were since.
        """
        restarted = []
        self.put_back = set()
        for k, p in enumerate(look.params):
            facts = self.facts[look.index[k]]
            count = steps_of(self.of(p)) or 0
            if not facts.counted or count >= facts.counted[2]:
                continue
            facts.put_back = count >= step - self.looked_at[look.index[k]]
            if facts.put_back:
                self.put_back.add(k)
            else:
                facts.begun_anew = "moments" if self._has_new_moments(look, k, step) else ""
                restarted.append(k)
        self._compare_weights(look, restarted)

    def _compare_weights(self, look, restarted):
        """Notice that the weights of what restarted were made anew too, of one tensor at least: of two
        factors the other may be kept.
        """
        parts = look.held.split(look.lengths)
        # a bias may be another after some steps
        for k in [k for k in restarted if look.params[k].dim() > 1]:
            then = self.weights.get(look.index[k])
            if then is not None and then.shape == parts[k].shape and _is_another(parts[k], then):
                for of_plan in restarted:
                    self.facts[look.index[of_plan]].begun_anew = "weights"
                return

    def _has_new_moments(self, look, k, step):
        """Whether most of exp_avg_sq is less than beta2 leaves of the last look's, or there is none."""
        p = look.params[k]
        v = self.answers.moment(p, "exp_avg_sq", self.pick)
        if v is None:
            return True
        then, index, lengths, before = self.last or (0, [], [], None)
        if look.index[k] not in index:
            return False
        before = before.split(lengths)[index.index(look.index[k])]
        left = self.answers.decay(p, "exp_avg_sq")[0] ** (step - then - 1)
        return v.shape == before.shape and float((v < 0.7 * left * before).float().mean()) > 0.5

    def _begun_anew(self, look, k, share):
        """What else of a state began anew with this share of a second moment, see Facts."""
        m = self.answers.moment(look.params[k], "exp_avg", self.pick)
        both = m is not None and float((m == 0).float().mean()) >= 0.9 * share
        return "moments" if both and look.v_dtypes[k] != torch.float16 else ""

    def _beside_a_momentum(self, p):
        m = self.answers.moment(p, "exp_avg", self.pick)
        # fp32 holds no square of less
        return m is not None and bool(m.abs().max() > 1e-15)

    def _fell(self, look, step):
        """[share of each tensor's exp_avg_sq that is far less than beta2 leaves of the last look's]"""
        if self.last is None or self.last[1:3] != (look.index, look.lengths):
            return [0.0] * len(look.lengths)
        then, _, _, before = self.last
        between = step - then - 1
        least = [
            self._least(p, between, step) if dtype is not None else 0.0
            for p, dtype in zip(look.params, look.v_dtypes, strict=True)
        ]
        fell = look.v < look.spread(least) * before
        return (totals([fell], look.lengths)[0].cpu() / torch.tensor(look.lengths)).tolist()

    def _least(self, p, between, step):
        """The least share of exp_avg_sq that so many steps can leave; 0.0 where that is not known."""
        beta = self.answers.decay(p, "exp_avg_sq")[0]
        t = steps_of(self.of(p)) or step
        # codes round too coarsely, and what has become small may be rounded away
        known = beta**between > 0.2 and t > between and not self.answers.coded(p, "exp_avg_sq")
        if not known:
            return 0.0
        # an average that corrects its own bias forgets more at first
        return 0.7 * beta**between * (1 - beta ** (t - between)) / (1 - beta**t)

    def stepped(self, look, step):
        """Remember the second moments after a step, and compare its counters."""
        if look.v is not None:
            self.last = step, look.index, look.lengths, look.new_v
            self.weights = dict(zip(look.index, look.new.split(look.lengths), strict=True))
        moved = counts = bool((look.new != look.held).any())
        for i, p in zip(look.index, look.params, strict=True):
            state = self.of(p)
            self.looked_at[i] = step
            self.facts[i].keeps |= bool(state)
            counts |= self.facts[i].before != steps_of(state)
            self._count(self.facts[i], state.get("step"), step, moved)
        self.passed_by |= not counts

    def before(self, facts, p, step):
        """Look at the dtype of exp_avg_sq, and at the counter before a step."""
        state = self.of(p)
        facts.empty += not state
        facts.before = steps_of(state)
        v, m = state.get("exp_avg_sq"), state.get("exp_avg")
        if not torch.is_tensor(v) or not torch.is_tensor(m) or type(v) is not torch.Tensor:
            return
        if facts.v_dtype is None:
            facts.v_dtype = v.dtype
        elif v.element_size() < facts.v_dtype.itemsize and facts.cast is None:
            facts.cast = facts.v_dtype, v.dtype, step

    # -- counters

    def _count(self, facts, counter, step, moved):
        """Compare a tensor's step counter with itself before the step, and with our own count."""
        value = steps_of({"step": counter})
        if value is None:
            return
        dtype = counter.dtype if torch.is_tensor(counter) else None
        _, stuck, last = facts.counted or (dtype, 0, None)
        if last is not None and value < last:
            facts.fell = last, value
            facts.counter = None
        if facts.counter is None:
            facts.counter = value, step
        first, since = facts.counter
        facts.behind = (step - since) - (value - first)
        facts.counted = dtype, stuck + (moved and facts.before == value), value


def _is_another(now, then):
    """Whether a weight was made anew: it is smaller, or no larger and unlike. Long steps make it larger."""
    size, before = float(now.norm()), float(then.norm())
    unlike = float((now * then).sum()) < 0.5 * size * before
    return size < 0.5 * before or (unlike and size < 1.2 * before)


def beta_power(answers, p):
    """beta2^t at the step that was done: what the second moment still lacks; 0.0 where there is none."""
    beta, t = answers.decay(p, "exp_avg_sq")
    return 0.0 if math.isnan(beta) or math.isinf(t) else beta ** max(1, t)
