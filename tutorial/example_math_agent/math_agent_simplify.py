"""A minimal math agent with a Python tool. It returns its own reward, so it needs no judge."""

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg
from agentscope.tool import Toolkit, execute_python_code

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner.task_judge.math_answer_as_judge import is_same_answer


class MathToolWorkflow(Workflow):
    name = "math_tool_workflow"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        task = workflow_task.task
        toolkit = Toolkit()
        toolkit.register_tool_function(execute_python_code)
        agent = ReActAgent(
            name="math_agent",
            sys_prompt="Solve the problem; you may run Python. Put the final answer within \\boxed{}.",
            model=model_tuner,
            formatter=OpenAIChatFormatter(),
            toolkit=toolkit,
            max_iters=3,
        )
        agent.set_console_output_enabled(False)
        reply = await agent.reply(Msg("user", task.main_query, role="user"))
        solved = is_same_answer(str(task.metadata["answer"]), reply.get_text_content() or "")
        return WorkflowOutput(reward=float(solved), is_success=solved)
