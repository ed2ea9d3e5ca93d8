"""An agent at a reception desk, which asks the patient questions and then names a department, and its judge."""

import re

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg
from agentscope.tool import Toolkit

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner.config.data import TaskJudgeConfig
from astuner.schema import Judgement
from astuner.task_judge.judge_base import BaseJudge
from tutorial.example_learning_to_ask.clinic import (
    RULES,
    LlmPatient,
    Patient,
    RuleBasedPatient,
    count_questions,
    describe,
)

MAX_TURNS = 5
SYSTEM_PROMPT = (
    "You work at the reception desk of a clinic. Ask the patient one question at a time, and only what you need to "
    "know. Then name the department: <department>NAME</department>\n"
    + "\n".join(f"For {complaint}: {describe(rule)}." for complaint, rule in RULES.items())
)


class LearningToAsk(Workflow):
    """The agent asks a simulated patient until it names a department. The default patient follows rules."""

    name = "learning_to_ask"

    def make_patient(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> Patient:
        return RuleBasedPatient(workflow_task.metadata["facts"])

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        patient, agent = self.make_patient(workflow_task, model_tuner), make_agent(model_tuner)
        message, questions = workflow_task.main_query, 0
        for _ in range(MAX_TURNS):
            reply = await agent.reply(Msg("patient", message, role="user"))
            text = reply.get_text_content() or ""
            if answers := re.findall(r"<department>(.*?)</department>", text, re.DOTALL):
                return WorkflowOutput(metadata={"final_answer": answers[-1].strip(), "questions": questions})
            questions += count_questions(text)
            message = await patient.answer(text)
        return WorkflowOutput(metadata={"final_answer": "", "questions": questions})


class LearningToAskAnLlm(LearningToAsk):
    """The patient is the model that `rollout.frozen_models.patient` names."""

    def make_patient(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> Patient:
        return LlmPatient(workflow_task.metadata["complaint"], workflow_task.metadata["facts"], model_tuner)


class FewQuestionsAsJudge(BaseJudge):
    """The reward is 1 for the right department, less `question_cost` for each question, and 0 for a wrong one."""

    def __init__(self, config: TaskJudgeConfig, question_cost: float = 0.1) -> None:
        super().__init__(config)
        self.question_cost = question_cost

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Judgement:
        department = workflow_task.metadata["department"]
        answer, questions = workflow_output.metadata["final_answer"], workflow_output.metadata["questions"]
        is_right = answer.lower() == department
        return Judgement(
            reward=max(0.0, 1 - self.question_cost * questions) if is_right else 0.0,
            is_success=is_right,
            explanation=f"the department is {department}; the answer is {answer!r}, after {questions} questions",
            metrics={"questions": questions},
        )


def make_agent(model_tuner: ModelTuner) -> ReActAgent:
    agent = ReActAgent(
        name="desk",
        sys_prompt=SYSTEM_PROMPT,
        model=model_tuner.as_agentscope_model(agent_name="desk", target_tag="desk"),
        formatter=OpenAIChatFormatter(),
        toolkit=Toolkit(),
        max_iters=1,
    )
    agent.set_console_output_enabled(False)
    return agent
