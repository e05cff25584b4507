package main

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/xeipuuv/gojsonschema"
)

// values.yaml, and over it the user's files in their order, checked against values.schema.json.
func readValues(folder string, files []string) (object, error) {
	values := object{}
	if err := readYAML(filepath.Join(folder, "values.yaml"), &values); err != nil {
		return nil, err
	}
	for _, file := range files {
		over := object{}
		if err := readYAML(file, &over); err != nil {
			return nil, err
		}
		merge(values, over)
	}
	schema, err := os.ReadFile(filepath.Join(folder, "values.schema.json"))
	if err != nil {
		return nil, err
	}
	result, err := gojsonschema.Validate(gojsonschema.NewBytesLoader(schema), gojsonschema.NewGoLoader(values))
	if err != nil {
		return nil, fmt.Errorf("values.schema.json: %v", err)
	}
	if !result.Valid() {
		text := "values don't meet the specifications of the schema(s):"
		for _, problem := range result.Errors() {
			text += fmt.Sprintf(" %s;", problem)
		}
		return nil, fmt.Errorf("%s", strings.TrimSuffix(text, ";"))
	}
	return values, nil
}

// Maps are merged key by key, null takes a key away, everything else replaces.
func merge(into, over object) {
	for key, value := range over {
		if value == nil {
			delete(into, key)
			continue
		}
		below, isMap := value.(object)
		if old, wasMap := into[key].(object); isMap && wasMap {
			merge(old, below)
			continue
		}
		into[key] = value
	}
}

// .Files: what the chart has beside its templates and what describes it.
type chartFiles map[string][]byte

// Get returns an empty text for a file that is not there, as Helm does.
func (f chartFiles) Get(name string) string { return string(f[name]) }

func (f chartFiles) Glob(pattern string) (chartFiles, error) {
	found := chartFiles{}
	for name, text := range f {
		matches, err := path.Match(pattern, name)
		if err != nil {
			return nil, err
		}
		if matches {
			found[name] = text
		}
	}
	return found, nil
}

// Links are followed, also out of the chart, as Helm does when it loads or packages a folder.
func readFiles(folder string) (chartFiles, error) {
	files := chartFiles{}
	var walk func(name string) error
	walk = func(name string) error {
		at := filepath.Join(folder, name)
		info, err := os.Stat(at)
		if err != nil {
			return err
		}
		if !info.IsDir() {
			text, err := os.ReadFile(at)
			files[name] = text
			return err
		}
		entries, err := os.ReadDir(at)
		if err != nil {
			return err
		}
		for _, entry := range entries {
			below := path.Join(name, entry.Name())
			if below == "templates" || below == "Chart.yaml" || below == "values.yaml" ||
				below == "values.schema.json" {
				continue
			}
			if err := walk(below); err != nil {
				return err
			}
		}
		return nil
	}
	return files, walk("")
}
