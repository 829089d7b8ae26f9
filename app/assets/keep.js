// Dash gives each component below a callback's output a new key with every answer, so React throws a page's nodes away to make the
// same again: the focus falls to the body, an open list or table closes, a maximised panel is gone. Here the keys stay, React compares,
// and what is the same keeps its node. Should Dash's wrappers look different some day, nothing is changed.
(function () {
  "use strict";
  const { React } = window;
  const create = React.createElement;
  function kept(props) {
    if (!props || props.key === undefined) return props;
    if ("componentType" in props && typeof props.key === "number") return { ...props, key: "kept" };
    const path = "_passedComponent" in props && props.componentPath;
    if (path && !props._passedComponent?.props?.id) return { ...props, key: String(path.at(-1)) }; // not the way from the root: a sibling above may go
    return props;
  }
  React.createElement = (type, props, ...children) => create(type, kept(props), ...children);
})();
