/** The plugins: prompt cells, completion, and the engine's status item and commands. All they need is optional but the notebook. */

import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ICommandPalette, MainAreaWidget, Notification } from '@jupyterlab/apputils';
import { EditorExtensionRegistry, IEditorExtensionRegistry } from '@jupyterlab/codemirror';
import { ICompletionProviderManager } from '@jupyterlab/completer';
import { INotebookTracker, type NotebookPanel } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator, type TranslationBundle } from '@jupyterlab/translation';
import { CommandRegistry } from '@lumino/commands';

import { activePrompt, regenerate, repairOutputs, stop, stopAll } from './commands';
import { PromptCompletions } from './complete';
import type { EngineLink } from './engine';
import { Engines } from './engines';
import { bytes, type Figures } from './figures';
import { promptHighlight } from './highlight';
import { provideControl, provideLinks } from './links';
import { EngineView } from './monitor';
import { replaceDeadViews } from './repair';
import { StatusItem, type Action } from './status';

const PLUGIN = 'mlxnb:plugin';
const NOT_CODE = ['text/x-ipythongfm', 'text/x-markdown', 'text/markdown'];

const highlight: JupyterFrontEndPlugin<void> = {
  id: 'mlxnb:highlight',
  description: 'Shows %%mlx cells as prompts.',
  autoStart: true,
  optional: [IEditorExtensionRegistry, ISettingRegistry],
  activate: async (_: JupyterFrontEnd, editors: IEditorExtensionRegistry | null, settings: ISettingRegistry | null) => {
    let wanted = true;
    editors?.addExtension({
      name: 'mlxnb-prompt',
      factory: ({ model }) =>
        wanted && !NOT_CODE.includes(model.mimeType)
          ? EditorExtensionRegistry.createImmutableExtension(promptHighlight(model.sharedModel.getSource()))
          : null
    });
    await follow(settings, 'highlight', value => (wanted = value));
  }
};

const completions: JupyterFrontEndPlugin<void> = {
  id: 'mlxnb:completions',
  description: 'Completes the options of %%mlx, also while the kernel is busy.',
  autoStart: true,
  optional: [ICompletionProviderManager],
  activate: (_: JupyterFrontEnd, manager: ICompletionProviderManager | null) => manager?.registerProvider(new PromptCompletions())
};

const engine: JupyterFrontEndPlugin<void> = {
  id: PLUGIN,
  description: 'The engine of the notebook in front: status item and commands.',
  autoStart: true,
  requires: [INotebookTracker],
  optional: [ICommandPalette, IStatusBar, ISettingRegistry, ITranslator],
  activate: async (
    app: JupyterFrontEnd,
    tracker: INotebookTracker,
    palette: ICommandPalette | null,
    statusBar: IStatusBar | null,
    settings: ISettingRegistry | null,
    translator: ITranslator | null
  ) => {
    const trans = (translator ?? nullTranslator).load('mlxnb');
    const engines = new Engines(tracker);
    provideLinks(engines);
    provideControl((commId, data) => engines.post(commId, data));
    replaceDeadViews(tracker, engines);
    const ids = addCommands(app, tracker, engines, trans);
    for (const command of ids) palette?.addItem({ command, category: trans.__('Language models') });
    let wanted = true;
    if (statusBar) {
      const item = new StatusItem(engines, trans, now => menu(app, engines, trans, now));
      statusBar.registerStatusItem(PLUGIN, {
        item,
        align: 'left',
        rank: 90,
        isActive: () => wanted && item.isActive,
        activeStateChanged: item.activeChanged
      });
    }
    await follow(settings, 'status', value => (wanted = value));
  }
};

/** Tell `take` a yes-or-no setting, now and whenever it changes. Without settings all is as by default. */
async function follow(settings: ISettingRegistry | null, name: string, take: (value: boolean) => void): Promise<void> {
  try {
    const loaded = await settings?.load(PLUGIN);
    const read = () => take(loaded?.composite[name] !== false);
    loaded?.changed.connect(read);
    read();
  } catch (error) {
    console.warn('mlxnb: its settings could not be read', error);
  }
}

type Act = (panel: NotebookPanel, link: EngineLink | null) => Promise<void>;

function addCommands(app: JupyterFrontEnd, tracker: INotebookTracker, engines: Engines, trans: TranslationBundle): string[] {
  const ids: string[] = [];
  const add = (id: string, label: string, caption: string, isEnabled: () => boolean, act: Act) => {
    ids.push(id);
    app.commands.addCommand(id, {
      label,
      caption,
      isEnabled,
      describedBy: { args: { type: 'object', properties: {} } },
      execute: async () => {
        const panel = tracker.currentWidget;
        if (!panel) return;
        try {
          await act(panel, engines.of(panel));
        } catch (error) {
          Notification.error(error instanceof Error ? error.message : String(error), { autoClose: 5000 });
        }
      }
    });
  };
  const kernel = () => Boolean(tracker.currentWidget?.sessionContext.session?.kernel);
  const open = () => Boolean(engines.current?.isOpen);
  add('mlxnb:stop', trans.__('Stop the Answer of This Cell'), trans.__('Keeps what was written so far'), kernel, stop);
  add('mlxnb:stop-all', trans.__('Stop All Answers'), trans.__('Stops every run of this kernel, in background cells too'), kernel, stopAll);
  const prompt = () => kernel() && activePrompt(tracker.currentWidget) !== null;
  add('mlxnb:regenerate', trans.__('Ask Again'), trans.__('Runs the prompt cell again'), prompt, regenerate);
  add('mlxnb:show-engine', trans.__('Show the Engine'), trans.__('Rows, speed and memory over time'), open, (panel, link) => showEngine(app, panel, link, trans));
  add('mlxnb:repair-outputs', trans.__('Restore Lost Answers'), trans.__('Puts finished answers back that a reload of the page lost'), open, async (panel, link) => {
    const count = await repairOutputs(panel, link);
    Notification.info(count === 1 ? trans.__('1 answer restored.') : count ? trans.__('%1 answers restored.', count) : trans.__('No answer was lost.'), { autoClose: 3000 });
  });
  engines.changed.connect(() => ids.forEach(id => app.commands.notifyCommandChanged(id)));
  return ids;
}

async function showEngine(app: JupyterFrontEnd, panel: NotebookPanel, link: EngineLink | null, trans: TranslationBundle): Promise<void> {
  if (!link) return;
  const widget = new MainAreaWidget({ content: new EngineView(link) });
  widget.id = `mlxnb-engine-${link.kernel.id}`;
  widget.title.label = trans.__('Engine');
  widget.title.caption = trans.__('The engine of %1', panel.title.label);
  widget.title.closable = true;
  panel.disposed.connect(() => widget.dispose());
  // Notebook 7 has one widget in its main area: the notebook.
  if (app.name === 'JupyterLab') app.shell.add(widget, 'main', { mode: 'split-right', ref: panel.id });
  else app.shell.add(widget, 'right');
  app.shell.activateById(widget.id);
}

function menu(app: JupyterFrontEnd, engines: Engines, trans: TranslationBundle, now: Figures): Action[] {
  const keys = (id: string) => {
    const binding = app.commands.keyBindings.find(one => one.command === id);
    return binding ? CommandRegistry.formatKeystroke(binding.keys.join(' ')) : '';
  };
  const command = (id: string, enabled: boolean): Action => ({
    label: app.commands.label(id), keys: keys(id), note: '', enabled, run: () => void app.commands.execute(id)
  });
  const unload = (name: string): Action => ({
    label: now.models.length > 1 ? trans.__('Unload %1', name) : trans.__('Unload the Model'),
    keys: '',
    note: now.models.length === 1 && now.weightBytes ? trans.__('frees %1', bytes(now.weightBytes + now.kvBytes)) : '',
    enabled: now.rows === 0,
    run: () => void engines.current?.command('unload', { model: name }).catch(error => Notification.error(String(error.message), { autoClose: 5000 }))
  });
  return [command('mlxnb:stop-all', now.rows + now.waiting > 0), command('mlxnb:show-engine', true), ...now.models.map(unload)];
}

export default [highlight, completions, engine];
