"""Students: flows that learn from a trained rectified flow, their teacher, and draw in few steps.

    reflow        pairs of noise and the teacher's image of it (reflow.py)
    distill       one step in place of two of the teacher's (distillation.py)
    consistency   the end of the teacher's path from anywhere on it (consistency.py), or from data alone

`--teacher RUN` names a checkpoint or a run's folder. The teacher is read in its own recipe, with its averaged
weights and its own guidance. The student has its net, starts from its weights in a recipe of its own, and
once trained needs no teacher.
"""

import torch

from harness.checkpoints import check_whole, fingerprint, fitting
from harness.checkpoints import read as read_checkpoint
from harness.files import read_json, write_json
from harness.flags import Flag, thousand
from lowprec.errors import Refused
from lowprec.precision import Precision
from lowprec.rules import Rule, check_machine
from precision import recipe_of_run
from tasks import metrics
from tasks.diffusion import RFlow
from tasks.generation import TIMESTEPS
from tasks.task import VALIDATED_ITEMS

FLOWS = ("rflow", "reflow")  # tasks whose runs can teach: velocities at any time
TEACHER_FILE = "teacher.json"  # in a student's folder: what its teacher's weights were

# Rows of every task with a teacher: one flag, whoever learns.
TEACHER = Flag(
    "teacher",
    "",
    "for students (reflow, distill, consistency): checkpoint or run folder of the rectified flow that they "
    "learn from; --model, --size, --data, --image_size and --velocity are the teacher's",
    "generation",
    kind="place",
    metavar="CHECKPOINT",
    may=("resume",),  # a teacher is told by its weights, not by its path
    titled=True,
)
TEACHER_STEPS = Flag(
    "teacher_steps",
    50,
    "steps in which the teacher draws: for reflow its pairs; for distill (default there: 8) two of them make "
    "one of the student's",
    "generation",
    type=thousand,
)


# ---- The teacher -------------------------------------------------------------------------------------------


class Teacher:
    """A trained flow, read from a checkpoint or a run's folder. table: of all flags; tasks: those that may
    have trained it. Raises Refused.
    """

    def __init__(self, path, table, tasks=FLOWS):
        self.path, self.checkpoint = path, read_checkpoint(path)
        check_whole(self.checkpoint, f"--teacher {path}", tasks)
        self.config = table.config(self.checkpoint["config"])
        self.recipe = recipe_of_run(self.config, table, RFlow.sites)
        self.average = self.checkpoint["precision"]["averages"]["ema"]

    @property
    def fingerprint(self):
        """SHA-256 of the averaged weights, their names, dtypes and shapes."""
        return fingerprint(self.average["shadow"])

    def check_known(self, known, path):
        """Raise Refused unless these weights have the fingerprint `known`, of a file of the run."""
        if known != self.fingerprint:
            raise Refused(
                f"{path} tells of another teacher than {self.path} holds now: give that teacher, or another "
                "--name"
            )

    def check(self, task):
        """Raise Refused unless the weights fit the net of `task`, which the data shape."""
        with torch.device("meta"):
            wanted = {name: p.shape for name, p in task.net().named_parameters()}
        found = {name: value.shape for name, value in self.average["shadow"].items()}
        if found != wanted:
            data = task.data
            raise Refused(
                f"--teacher {self.path}: its weights don't fit {data.name} as it is now ({data}): give the "
                "data it was trained on"
            )

    def generator(self, data, device):
        """(task, net): the teacher's task on the student's data, and its averaged weights in its own recipe.

        Only the average is read: the optimiser that made it need not be possible here.
        """
        task = RFlow(data, self.recipe, self.config)
        run = Precision(task.net().to(device), self.recipe, ema_decay=self.config.ema_decay)
        with fitting(f"--teacher {self.path}"):
            saved = self.checkpoint["precision"]["model"]
            for part in run.parts:
                saved = part.adapt(run.model.state_dict(), saved)
            run.model.load_state_dict(saved)
            run.ema.load_state_dict(self.average)
        return task, run.generator()


# ---- The student -------------------------------------------------------------------------------------------

NEEDS_TEACHER = Rule(  # of students that learn from nothing else
    lambda c: not c.teacher,
    lambda c: f"--task {c.task} learns from a teacher: add --teacher CHECKPOINT, of a rectified flow",
)
OWN_TIMES = Rule(  # of students that don't draw timesteps as --timestep_sampling says
    lambda c: c.timestep_sampling != "uniform",
    lambda c: f"--timestep_sampling {c.timestep_sampling}: --task {c.task} has times of its own; drop it",
)


class Student(RFlow):
    """A rectified flow that starts from a teacher's weights. Its kinds say what they learn from it.

    A kind whose loss asks the teacher at every step finds it in `live`, the teacher's task and its net.
    """

    teachers = FLOWS  # tasks whose runs can teach this one
    watched = ("frechet", "lower")  # a loss on real images with independent noise is not what students learn
    live = None
    rules = (
        *RFlow.rules,
        Rule(
            lambda c: c.vae or c.condition != "none",
            lambda c: f"--task {c.task} draws images from noise alone, "
            f"{'not in latents (--vae)' if c.vae else 'and beside no image (--condition)'}: drop that flag, "
            "or give a teacher that was trained without it",
        ),
        Rule(
            lambda c: c.teacher and c.finetune,
            lambda c: f"--finetune with --task {c.task}: a student starts from its teacher's weights; drop "
            "--finetune, or give that run as --teacher",
        ),
    )

    @classmethod
    def settle(cls, table, given):
        if not given.get("teacher"):
            return {}
        teacher = Teacher(given["teacher"], table, cls.teachers)
        config = table.typed(given)
        shared = {}
        for row in table.fitting():
            if row.name == "task":
                continue
            shared[row.name] = getattr(teacher.config, row.name)
            if row.name in given:
                own = cls.meant(row.name, config)
                cls._compare(row, teacher, cls.meant(row.name, teacher.config), own)
                if row.kind == "code":  # it may have moved
                    shared[row.name] = own
        shared["data"] = given.get("data", shared["data"])  # it may have moved
        shared["image_size"] = teacher.config.image_size
        if given.get("image_size"):
            its = shared["image_size"] or cls.load(config.replaced(**shared)).image_size
            cls._compare(table["image_size"], teacher, its, given["image_size"])
        return {**shared, **cls.settle_steps(teacher, given)}

    @staticmethod
    def _compare(row, teacher, its, own):
        """Raise Refused for a flag whose value is not the teacher's."""
        if row.comparable(its) != row.comparable(own):
            raise Refused(
                f"--{row.name} {own} differs from the teacher's {its or '(none)'}: the student starts from "
                f"the weights of {teacher.path}; drop --{row.name}"
            )

    @classmethod
    def settle_steps(cls, teacher, given):
        """{flag: value} of what the steps of a Teacher decide."""
        return {}

    @property
    def starts_elsewhere(self):
        return bool(self.config.teacher) or super().starts_elsewhere

    def read_teacher(self, run):
        """The Teacher, whose weights fit. Raises Refused. run: the Trainer."""
        teacher = Teacher(self.config.teacher, run.table, self.teachers)
        teacher.check(self)
        return teacher

    def start(self, run):
        if not self.config.teacher:
            return super().start(run)
        teacher = self.read_teacher(run)
        check_machine(teacher.recipe, run.device)
        self._check_known(teacher, run)
        return None if run.folder.has_checkpoint else teacher.checkpoint

    def _check_known(self, teacher, run):
        path = run.folder / TEACHER_FILE
        if path.exists():
            teacher.check_known(read_json(path).get("sha256"), path)

    def bring_teacher(self, run):
        """Let the teacher live beside the training; its fingerprint is written into the run's folder."""
        teacher = self.read_teacher(run)
        self._check_known(teacher, run)
        if run.ranks.main and not run.draws:
            write_json(run.folder / TEACHER_FILE, {"path": str(teacher.path), "sha256": teacher.fingerprint})
        self.live = teacher.generator(self.data, run.device)

    def again(self, recipe):
        task = super().again(recipe)
        task.live = self.live
        return task

    @torch.no_grad()
    def teach(self, x, labels, t, following):
        """x [B, C, H, W] after an Euler step of the live teacher from timesteps t [B] to `following` [B]."""
        task, net = self.live
        velocity = task.sign * task.predict(net, x, t, labels, task.config.guidance).float()
        return x + ((t - following) / TIMESTEPS)[:, None, None, None] * velocity

    @torch.no_grad()
    def validate(self, model, rng):
        """{"frechet"} of as many images as Task.validate looks at, drawn as at the end."""
        d = self.data
        judge = self.judge(rng.device)
        labels = self.wanted_labels(VALIDATED_ITEMS, rng.device)
        noise = rng.normal(len(labels), d.channels, d.image_size, d.image_size)
        images = self.sample(model, labels, noise, self.config.sample_steps)
        scores = metrics.generation_scores(self.scorer(rng.device), images.cpu(), None, judge.heldout_images)
        return {"frechet": scores["frechet"]}
