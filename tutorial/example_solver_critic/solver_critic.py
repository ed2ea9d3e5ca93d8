"""A solver and a critic that share the weights of one model. The solver is trained, and the critic is not."""

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg
from agentscope.tool import Toolkit

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner.task_judge.math_answer_as_judge import is_same_answer

PROMPTS = {
    "solver": "Solve the problem step by step. Put the final answer within \\boxed{}.",
    "critic": "Check the solution of the problem. Name its first mistake, or say that it is right. Do not solve it.",
}


class SolverAndCritic(Workflow):
    """The solver writes a draft, the critic comments on it, and the solver writes the final solution."""

    name = "solver_and_critic"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        solver, critic = make_agent("solver", model_tuner), make_agent("critic", model_tuner)
        problem, answer = workflow_task.main_query, str(workflow_task.metadata["answer"])

        draft = await ask(solver, problem)
        remark = await ask(critic, f"Problem: {problem}\n\nSolution: {draft}")
        final = await ask(solver, f"A critic says: {remark}\n\nWrite the final solution.")

        solved = is_same_answer(answer, final)
        metrics = {"draft_solved": float(is_same_answer(answer, draft))}
        return WorkflowOutput(reward=float(solved), is_success=solved, log_metrics=metrics)


def make_agent(name: str, model_tuner: ModelTuner) -> ReActAgent:
    """Return an agent whose name is also its target tag in the configuration."""
    agent = ReActAgent(
        name=name,
        sys_prompt=PROMPTS[name],
        model=model_tuner.as_agentscope_model(agent_name=name, target_tag=name),
        formatter=OpenAIChatFormatter(),
        toolkit=Toolkit(),
        max_iters=1,
    )
    agent.set_console_output_enabled(False)
    return agent


async def ask(agent: ReActAgent, text: str) -> str:
    reply = await agent.reply(Msg("user", text, role="user"))
    return reply.get_text_content() or ""
