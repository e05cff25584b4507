// chart_render prints what `helm template` prints for a chart, for tests: Helm is not in Debian.
//
//	chart_render [--release NAME] [--namespace NAME] [--kube-version VERSION] [--notes] CHART [VALUES.yaml ...]
//
// The template engine, the functions (sprig), the YAML library and the check of values against
// values.schema.json are the ones that Helm 3 is made of. Of Helm's own functions it has those that
// our chart uses; another one is an error when templates are parsed. It is stricter than Helm: a
// value that neither values.yaml nor the user names is an error, not an empty text.
//
// Exit code 1 with one line on standard error when a value is refused or a template fails.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/Masterminds/semver"
	"github.com/Masterminds/sprig"
	"sigs.k8s.io/yaml"
)

type object = map[string]interface{}

func main() {
	release := flag.String("release", "kvmill", "name of the release")
	namespace := flag.String("namespace", "kvmill", "its namespace")
	kube := flag.String("kube-version", "v1.30.0", "version of Kubernetes")
	notes := flag.Bool("notes", false, "print NOTES.txt only")
	flag.Parse()
	if flag.NArg() < 1 {
		flag.Usage()
		os.Exit(2)
	}
	text, err := render(flag.Arg(0), flag.Args()[1:], *release, *namespace, *kube, *notes)
	if err != nil {
		fmt.Fprintln(os.Stderr, "chart_render: "+err.Error())
		os.Exit(1)
	}
	fmt.Print(text)
}

func render(folder string, valueFiles []string, release, namespace, kube string, notes bool) (string, error) {
	chart := object{}
	if err := readYAML(filepath.Join(folder, "Chart.yaml"), &chart); err != nil {
		return "", err
	}
	version, err := checkKubeVersion(chart, kube)
	if err != nil {
		return "", err
	}
	values, err := readValues(folder, valueFiles)
	if err != nil {
		return "", err
	}
	files, err := readFiles(folder)
	if err != nil {
		return "", err
	}
	templates, err := parse(folder, fmt.Sprint(chart["name"]))
	if err != nil {
		return "", err
	}
	top := object{
		"Values": values,
		"Chart": object{"Name": chart["name"], "Version": chart["version"],
			"AppVersion": chart["appVersion"]},
		"Release": object{"Name": release, "Namespace": namespace, "Service": "Helm",
			"IsInstall": true, "IsUpgrade": false, "Revision": 1},
		"Capabilities": object{"APIVersions": apiVersions{},
			"KubeVersion": object{"Version": kube, "Major": fmt.Sprint(version.Major()),
				"Minor": fmt.Sprint(version.Minor())}},
		"Files": files,
	}
	return execute(templates, top, notes)
}

// What a cluster has beside Kubernetes' own kinds, as Helm sees it without a cluster: nothing.
type apiVersions struct{}

func (apiVersions) Has(string) bool { return false }

func checkKubeVersion(chart object, kube string) (*semver.Version, error) {
	version, err := semver.NewVersion(kube)
	if err != nil {
		return nil, fmt.Errorf("--kube-version %s: %v", kube, err)
	}
	wanted, ok := chart["kubeVersion"].(string)
	if !ok {
		return version, nil
	}
	constraint, err := semver.NewConstraint(wanted)
	if err != nil {
		return nil, fmt.Errorf("Chart.yaml: kubeVersion: %v", err)
	}
	if !constraint.Check(version) {
		return nil, fmt.Errorf("chart requires kubeVersion: %s which is incompatible with Kubernetes %s",
			wanted, kube)
	}
	return version, nil
}

func readYAML(path string, into interface{}) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := yaml.UnmarshalStrict(text, into); err != nil {
		return fmt.Errorf("%s: %v", path, err)
	}
	return nil
}

// Runs every template but those whose file begins with _, in the order of their names.
func execute(templates *template.Template, top object, notes bool) (string, error) {
	var names []string
	for _, t := range templates.Templates() {
		base := filepath.Base(t.Name())
		if !strings.Contains(t.Name(), "/templates/") || strings.HasPrefix(base, "_") ||
			(base == "NOTES.txt") != notes {
			continue
		}
		names = append(names, t.Name())
	}
	sort.Strings(names)
	var out strings.Builder
	for _, name := range names {
		var text strings.Builder
		top["Template"] = object{"Name": name, "BasePath": filepath.Dir(name)}
		if err := templates.ExecuteTemplate(&text, name, top); err != nil {
			return "", err
		}
		if strings.TrimSpace(text.String()) == "" {
			continue
		}
		if notes {
			out.WriteString(text.String())
		} else {
			fmt.Fprintf(&out, "---\n# Source: %s\n%s\n", name, strings.TrimSpace(text.String()))
		}
	}
	return out.String(), nil
}

// All files below templates/ in one set, so that each sees what the others define.
func parse(folder, chart string) (*template.Template, error) {
	set := template.New(chart).Option("missingkey=error")
	functions := sprig.TxtFuncMap()
	delete(functions, "env") // As in Helm: charts do not read the environment of who installs them.
	delete(functions, "expandenv")
	functions["toYaml"] = func(value interface{}) (string, error) {
		text, err := yaml.Marshal(value)
		return strings.TrimSuffix(string(text), "\n"), err
	}
	functions["fromYaml"] = func(text string) (object, error) {
		value := object{}
		return value, yaml.Unmarshal([]byte(text), &value)
	}
	functions["include"] = func(name string, data interface{}) (string, error) {
		var out strings.Builder
		err := set.ExecuteTemplate(&out, name, data)
		return out.String(), err
	}
	functions["required"] = func(message string, value interface{}) (interface{}, error) {
		if value == nil || value == "" {
			return nil, fmt.Errorf("%s", message)
		}
		return value, nil
	}
	set.Funcs(functions)
	root := filepath.Join(folder, "templates")
	err := filepath.Walk(root, func(path string, info os.FileInfo, err error) error {
		if err != nil || info.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		_, err = set.New(chart + "/templates/" + name).Parse(string(text))
		return err
	})
	return set, err
}
